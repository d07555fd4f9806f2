// Kimi Delta Attention (2025): a gated delta net whose states decay by key channel. A layer's `qkv` makes the
// convolution's inputs. `gates` makes each head's beta, followed by two short vectors: from the first, `decays` makes
// each channel's decay, rate * softplus(made + shift); from the second, `opening` makes the gates of the normed
// outputs.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "delta_rule.h"
#include "gate_math.h"

namespace {

class KdaMixer : DeltaRule {
  public:
    explicit KdaMixer(Work& work) : DeltaRule(work) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const Recurrent& kda = *layer.recurrent;
        const LayerStateSlots& of = m.state_slots[kda.number];
        const int64_t n = rows.count;
        const int64_t width = of.heads * of.value_dim, decaying = of.heads * of.decay_dim, made = kda.gates.out;
        w.mixed.resize(w.room * width), gates.resize(n * made);
        make_room(of, n, decaying);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        w.project(l, GATES, w.normed.data(), kda.gates, gates.data(), n);
        expand(kda.decays, of.heads, made, n, decayed);
        expand(kda.opening, of.heads + kda.decays.in, made, n, opening);
        convolve(kda, rows, w.product.data(), layer.qkv.out);
        w.each_row(n, [&](int64_t r) {
            finish_convolved(of, r);
            for (int64_t h = 0; h < of.heads; h++) {
                betas[r * of.heads + h] = beta_of(gates[r * made + h]);
                const int64_t first = h * of.decay_dim;
                for (int64_t i = first; i < first + of.decay_dim; i++)
                    decays[r * decaying + i] = kda.rates[h] * softplus(widen(decayed[r * decaying + i]) + kda.shifts[i]);
            }
        });
        apply(rows, of);
        w.each_row(n, [&](int64_t r) {
            for (int64_t first = r * width; first < (r + 1) * width; first += of.value_dim)
                opened_norm_row(&read[first], kda.norm, &opening[first], of.value_dim, m.norm_epsilon, &w.mixed[first]);
        });
        return width;
    }

  private:
    // Multiplies the values from `first` on in each row of `gates` by low-rank weights.
    void expand(const Weights& weights, int64_t first, int64_t step, int64_t n, std::vector<Value>& out) {
        low.resize(n * weights.in), out.resize(n * weights.out);
        for (int64_t r = 0; r < n; r++)
            memcpy(&low[r * weights.in], &gates[r * step + first], weights.in * sizeof(Value));
        w.multiply(low.data(), weights, out.data(), n);
    }

    // Norms a head's read values and multiplies them by sigmoid(gate); only the result is rounded.
    static void opened_norm_row(float* __restrict x, const Value* __restrict weight, const Value* __restrict gate,
                                int64_t size, double epsilon, Value* __restrict out) {
        for (int64_t i = 0; i < size; i++) x[i] = rounded(x[i]);
        const float factor = 1 / std::sqrt(sum_of_squares(x, size) / float(size) + float(epsilon));
        float below[PIECE];
        for (int64_t first = 0; first < size; first += PIECE) {
            const int64_t count = std::min(PIECE, size - first);
            denominators(gate + first, count, below);
            for (int64_t i = first; i < first + count; i++)
                out[i] = narrow(widen(weight[i]) * (x[i] * factor) / below[i - first]);
        }
    }

    std::vector<Value> gates, low, decayed, opening;
};

}  // namespace
