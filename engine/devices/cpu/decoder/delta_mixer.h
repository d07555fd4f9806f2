// A gated delta net (Gated DeltaNet, 2024). A layer's `qkv` makes the convolution's inputs, followed by the gates of
// the normed outputs; `gates` makes each head's beta, followed by the heads' decays: rate * softplus(made + shift).

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "delta_rule.h"
#include "gate_math.h"

namespace {

class DeltaMixer : DeltaRule {
  public:
    explicit DeltaMixer(Work& work) : DeltaRule(work) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const Recurrent& delta = *layer.recurrent;
        const LayerStateSlots& of = m.state_slots[delta.number];
        const int64_t n = rows.count, channels = of.channels;
        const int64_t width = of.heads * of.value_dim, step = layer.qkv.out;
        w.mixed.resize(w.room * width), gates.resize(n * 2 * of.heads);
        make_room(of, n, of.heads);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        w.project(l, GATES, w.normed.data(), delta.gates, gates.data(), n);
        if (delta.interleaved) part_heads(of, n, step);
        convolve(delta, rows, w.product.data(), step);
        w.each_row(n, [&](int64_t r) {
            finish_convolved(of, r);
            const Value* made = &gates[r * 2 * of.heads];
            for (int64_t h = 0; h < of.heads; h++) {
                betas[r * of.heads + h] = beta_of(made[h]);
                decays[r * of.heads + h] = delta.rates[h] * softplus(widen(made[of.heads + h]) + delta.shifts[h]);
            }
        });
        apply(rows, of);
        w.each_row(n, [&](int64_t r) {
            for (int64_t first = 0; first < width; first += of.value_dim)
                opened_norm_row(&read[r * width + first], delta.norm, &w.product[r * step + channels + first],
                                of.value_dim, m.norm_epsilon, &w.mixed[r * width + first]);
        });
        return width;
    }

  private:
    // Reorders the products of models that interleave heads: from each key head's query, key, values and gates to all
    // queries, then all keys, and so on; likewise betas and decays.
    void part_heads(const LayerStateSlots& of, int64_t n, int64_t step) {
        const int64_t each = of.heads / of.key_heads;
        w.each_row(n, [&](int64_t r) {
            const int64_t values = each * of.value_dim;
            sort_heads(&w.product[r * step], of.key_heads, {of.key_dim, of.key_dim, values, values});
            sort_heads(&gates[r * 2 * of.heads], of.key_heads, {each, each});
        });
    }

    // Reorders a row of `heads` heads, each with parts of these sizes, to all heads' first parts, then all second
    // parts, and so on.
    static void sort_heads(Value* row, int64_t heads, std::initializer_list<int64_t> sizes) {
        const int64_t size = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
        thread_local std::vector<Value> made;
        made.assign(row, row + heads * size);
        int64_t before = 0;
        for (const int64_t part : sizes) {
            for (int64_t h = 0; h < heads; h++, row += part) memcpy(row, &made[h * size + before], part * sizeof(Value));
            before += part;
        }
    }

    // Norms a head's read values and multiplies them by silu(gate).
    static void opened_norm_row(float* __restrict x, const Value* __restrict weight, const Value* __restrict gate,
                                int64_t size, double epsilon, Value* __restrict out) {
        for (int64_t i = 0; i < size; i++) x[i] = rounded(x[i]);
        const float factor = 1 / std::sqrt(sum_of_squares(x, size) / float(size) + float(epsilon));
        float below[PIECE];
        for (int64_t first = 0; first < size; first += PIECE) {
            const int64_t count = std::min(PIECE, size - first);
            denominators(gate + first, count, below);
            for (int64_t i = first; i < first + count; i++)
                out[i] = narrow(rounded(widen(weight[i]) * rounded(x[i] * factor)) * (widen(gate[i]) / below[i - first]));
        }
    }

    std::vector<Value> gates;
};

}  // namespace
