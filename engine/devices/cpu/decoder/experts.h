// A mixture of experts. A router selects some of a layer's experts for each row; their outputs are weighted and added
// to the output of the MLP next to them, if any.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gate_math.h"
#include "routing.h"
#include "work.h"

namespace {

class ExpertMlp {
  public:
    explicit ExpertMlp(Work& work) : w(work), m(work.m) {}

    // Adds the experts' outputs for the `normed` rows to `product`, or writes them there if there is no MLP.
    void run(size_t l, int64_t n) {
        const Layer& layer = w.layers[l];
        const Experts& e = *layer.experts;
        choose(e, n);
        const int64_t rows = n * e.chosen, inner = e.second.inputs;
        made.resize(rows * e.first.outputs), active.resize(rows * inner), outputs.resize(rows * m.hidden);
        multiply(e, e.first, w.normed.data(), made.data(), rows, e.chosen);
        w.each_row(rows, [&](int64_t r) { w.activate(&made[r * e.first.outputs], inner, &active[r * inner]); });
        multiply(e, e.second, active.data(), outputs.data(), rows, 1);
        if (e.shared_gate) {
            shared_gates.resize(n);
            w.project(l, SHARED_GATE, w.normed.data(), e.shared_gate, shared_gates.data(), n);
        }
        const bool beside_mlp = bool(layer.down);
        w.each_row(n, [&](int64_t r) {
            Value* out = &w.product[r * m.hidden];
            if (!beside_mlp) std::fill_n(out, m.hidden, Value(0));
            else if (e.shared_gate) scale_row(out, rounded(1 / (1 + exp_of(-widen(shared_gates[r])))), m.hidden);
            add_outputs(e, r, out);
        });
    }

  private:
    void choose(const Experts& e, int64_t n) {
        scores.resize(n * e.count), chosen.resize(n * e.chosen), weights.resize(n * e.chosen);
        if (e.router) {
            logits.resize(n * e.count);
            w.multiply(w.normed.data(), e.router, logits.data(), n);
        }
        w.each_row(n, [&](int64_t r) {
            float* row = &scores[r * e.count];
            for (int64_t i = 0; i < e.count; i++)
                row[i] = e.router ? widen(logits[r * e.count + i])
                                  : dot(&w.normed[r * m.hidden], e.exact_router + i * m.hidden, m.hidden);
            thread_local Routing routing;
            routing.choose(e, row, &chosen[r * e.chosen], &weights[r * e.chosen]);
        });
    }

    void multiply(const Experts& e, const ExpertWeights& of, const Value* in, Value* out, int64_t rows, int64_t sharing) {
        const Routed routed{in, chosen.data(), out, rows, sharing, e.count, of.inputs, of.outputs};
        if (of.quantized)
            return m.routed_quantized_linear(&routed, of.quantized, of.words, of.scales, w.threads, m.parallel);
        m.routed_linear(&routed, of.values, of.bias, w.threads, m.parallel);
    }

    void add_outputs(const Experts& e, int64_t r, Value* __restrict out) {
        float sums[PIECE];
        for (int64_t first = 0; first < m.hidden; first += PIECE) {
            const int64_t count = std::min(PIECE, m.hidden - first);
            std::fill_n(sums, count, 0.0f);
            for (int64_t i = r * e.chosen; i < (r + 1) * e.chosen; i++) {
                const Value* output = &outputs[i * m.hidden + first];
                for (int64_t k = 0; k < count; k++) {
                    const float weighted = widen(output[k]) * weights[i];
                    sums[k] += e.rounds ? rounded(weighted) : weighted;
                }
            }
            for (int64_t k = 0; k < count; k++) out[first + k] = narrow(widen(out[first + k]) + rounded(sums[k]));
        }
    }

    static float dot(const Value* __restrict x, const float* __restrict weights, int64_t size) {
        constexpr int LANES = 16;
        float sums[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            for (int lane = 0; lane < LANES; lane++) sums[lane] += widen(x[i + lane]) * weights[i + lane];
        float sum = 0;
        for (; i < size; i++) sum += widen(x[i]) * weights[i];
        for (const float of_lane : sums) sum += of_lane;
        return sum;
    }

    Work& w;
    const Model& m;
    Values logits, made, active, outputs, shared_gates;
    std::vector<float> scores, weights;
    std::vector<int64_t> chosen;  // [rows, experts of a row]
};

}  // namespace
