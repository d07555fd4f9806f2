// Gated delta nets. A convolution of the first outputs of a layer's `qkv` makes queries and keys, which get unit
// length, and values; `gates` makes each head's beta. A decay is rate * softplus(made + shift).
//
// In Gated DeltaNet (2024) `qkv` also makes the gates of the normed outputs, and `gates` the heads' decays. In Kimi
// Delta Attention (2025), whose states decay by key channel, `gates` makes two short vectors: from the first, `decays`
// makes each channel's decay; from the second, `opening` makes the gates of the normed outputs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "gate_math.h"
#include "recurrent_mixer.h"

namespace {

class DeltaMixer : RecurrentMixer {
  public:
    explicit DeltaMixer(Work& work) : RecurrentMixer(work) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const Recurrent& delta = *layer.recurrent;
        const LayerStateSlots& of = m.state_slots[delta.number];
        const int64_t n = rows.count, channels = of.channels, keys = of.key_heads * of.key_dim;
        const int64_t width = of.heads * of.value_dim, decaying = of.heads * of.decay_dim;
        const int64_t step = layer.qkv.outputs, made = delta.gates.outputs;
        w.mixed.resize(w.room * width), gates.resize(n * made);
        betas.resize(n * of.heads), decays.resize(n * decaying), read.resize(n * width);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        w.project(l, GATES, w.normed.data(), delta.gates, gates.data(), n);
        if (delta.interleaved) part_heads(of, n, step);
        Strided decay{gates.data() + of.heads, made}, opening{w.product.data() + channels, step};
        if (delta.decays) {
            decay = expand(delta.decays, of.heads, made, n, decayed);
            opening = expand(delta.opening, of.heads + delta.decays.inputs, made, n, opened);
        }
        convolve(delta, rows, w.product.data(), step);
        w.each_row(n, [&](int64_t r) {
            float* row = &convolved[r * channels];
            silu_row(row, channels);
            for (int64_t first = 0; first < 2 * keys; first += of.key_dim)
                unit_row(row + first, of.key_dim, first < keys ? 1 / std::sqrt(float(of.key_dim)) : 1);
            for (int64_t h = 0; h < of.heads; h++) {
                betas[r * of.heads + h] = rounded(1 / (1 + exp_of(-widen(gates[r * made + h]))));
                for (int64_t i = h * of.decay_dim; i < (h + 1) * of.decay_dim; i++)
                    decays[r * decaying + i] = delta.rates[h] * softplus(widen(decay.row(r)[i]) + delta.shifts[i]);
            }
        });
        const float* query = convolved.data();
        attend(rows, {&of, query, query + keys, query + 2 * keys, decays.data(), betas.data(), nullptr, read.data(),
                      channels, channels, channels});
        w.each_row(n, [&](int64_t r) {
            for (int64_t first = 0; first < width; first += of.value_dim)
                open_normed(delta, &read[r * width + first], opening.row(r) + first, of.value_dim,
                            &w.mixed[r * width + first]);
        });
        return width;
    }

  private:
    struct Strided {
        const Value* first;
        int64_t step;

        const Value* row(int64_t r) const { return first + r * step; }
    };

    // Multiplies the values from `first` on in each row of `gates` by low-rank weights.
    Strided expand(const Weights& weights, int64_t first, int64_t step, int64_t n, Values& out) {
        low.resize(n * weights.inputs), out.resize(n * weights.outputs);
        for (int64_t r = 0; r < n; r++)
            memcpy(&low[r * weights.inputs], &gates[r * step + first], weights.inputs * sizeof(Value));
        w.multiply(low.data(), weights, out.data(), n);
        return {out.data(), weights.outputs};
    }

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
        thread_local Values made;
        made.assign(row, row + heads * size);
        int64_t before = 0;
        for (const int64_t part : sizes) {
            for (int64_t h = 0; h < heads; h++, row += part) memcpy(row, &made[h * size + before], part * sizeof(Value));
            before += part;
        }
    }

    // Norms a head's read values and multiplies them by silu(gate); with decays by channel by sigmoid(gate), where only
    // the result is rounded.
    void open_normed(const Recurrent& delta, float* __restrict x, const Value* __restrict gate, int64_t size,
                     Value* __restrict out) const {
        const Value* __restrict weight = delta.norm;
        for (int64_t i = 0; i < size; i++) x[i] = rounded(x[i]);
        const float factor = 1 / std::sqrt(sum_of_squares(x, size) / float(size) + float(m.norm_epsilon));
        float below[PIECE];
        for (int64_t first = 0; first < size; first += PIECE) {
            const int64_t end = std::min(first + PIECE, size);
            denominators(gate + first, end - first, below);
            if (delta.decays)
                for (int64_t i = first; i < end; i++)
                    out[i] = narrow(widen(weight[i]) * (x[i] * factor) / below[i - first]);
            else
                for (int64_t i = first; i < end; i++) {
                    const float normed = rounded(widen(weight[i]) * rounded(x[i] * factor));
                    out[i] = narrow(normed * (widen(gate[i]) / below[i - first]));
                }
        }
    }

    Values gates, low, decayed, opened;
    std::vector<float> betas, decays, read;  // [rows, heads], [rows, heads, 1 or key_dim], [rows, heads, value_dim]
};

}  // namespace
