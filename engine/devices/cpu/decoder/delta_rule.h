// Base of the delta rule's mixers: a convolution makes queries, keys and values; queries and keys get unit length.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "gate_math.h"
#include "recurrent_mixer.h"

namespace {

class DeltaRule : protected RecurrentMixer {
  protected:
    explicit DeltaRule(Work& work) : RecurrentMixer(work) {}

    // Makes room for n rows with `decaying` decays each.
    void make_room(const LayerStateSlots& of, int64_t n, int64_t decaying) {
        betas.resize(n * of.heads), decays.resize(n * decaying), read.resize(n * of.heads * of.value_dim);
    }

    void finish_convolved(const LayerStateSlots& of, int64_t r) {
        float* row = &convolved[r * of.channels];
        const int64_t keys = of.key_heads * of.key_dim;
        silu_row(row, of.channels);
        for (int64_t first = 0; first < 2 * keys; first += of.key_dim)
            unit_row(row + first, of.key_dim, first < keys ? 1 / std::sqrt(float(of.key_dim)) : 1);
    }

    static float beta_of(Value made) { return rounded(1 / (1 + exp_of(-widen(made)))); }

    // Fills `read`.
    void apply(const Rows& rows, const LayerStateSlots& of) {
        const int64_t keys = of.key_heads * of.key_dim, channels = of.channels;
        const float* query = convolved.data();
        attend(rows, {&of, query, query + keys, query + 2 * keys, decays.data(), betas.data(), nullptr, read.data(),
                      channels, channels, channels});
    }

    std::vector<float> betas, decays, read;  // [rows, heads], [rows, heads, 1 or key_dim], [rows, heads, value_dim]
};

}  // namespace
