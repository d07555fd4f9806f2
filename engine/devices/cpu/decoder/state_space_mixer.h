// A state space (Mamba2, 2024): linear attention without the delta rule. A layer's `qkv` makes the outputs' gates,
// applied before a norm, after it or without one; the convolution's inputs, which become values, keys and queries; and
// each head's time, softplus(made + shift) within limits, for which its state decays at the head's rate. The value
// times the head's skip is added to the output.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "gate_math.h"
#include "recurrent_mixer.h"

namespace {

class StateSpaceMixer : RecurrentMixer {
  public:
    explicit StateSpaceMixer(Work& work) : RecurrentMixer(work) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const Recurrent& space = *layer.recurrent;
        const LayerStateSlots& of = m.state_slots[space.number];
        const int64_t n = rows.count, channels = of.channels, keys = of.key_heads * of.key_dim;
        const int64_t width = of.heads * of.value_dim, step = layer.qkv.outputs;
        w.mixed.resize(w.room * width);
        values.resize(n * width), decays.resize(n * of.heads), read.resize(n * width);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        const Value* made = w.product.data();
        convolve(space, rows, made + width, step);
        w.each_row(n, [&](int64_t r) {
            silu_row(&convolved[r * channels], channels);
            for (int64_t h = 0; h < of.heads; h++) {
                const float time = time_of(space, made[r * step + width + channels + h], h);
                decays[r * of.heads + h] = space.rates[h] * time;
                const float* x = &convolved[r * channels + h * of.value_dim];
                float* value = &values[r * width + h * of.value_dim];
                for (int64_t i = 0; i < of.value_dim; i++) value[i] = x[i] * time;
            }
        });
        const float* key = convolved.data() + width;
        attend(rows, {&of, key + keys, key, values.data(), decays.data(), nullptr, nullptr, read.data(), channels,
                      channels, width});
        w.each_row(n, [&](int64_t r) {
            float* row = &read[r * width];
            for (int64_t i = 0; i < width; i++)
                row[i] += space.skips[i / of.value_dim] * convolved[r * channels + i];
            finish_row(space, row, made + r * step, width, &w.mixed[r * width]);
        });
        return width;
    }

  private:
    static float time_of(const Recurrent& space, Value made, int64_t head) {
        const float time = rounded(softplus(rounded(widen(made) + rounded(space.shifts[head]))));
        return std::min(std::max(time, space.shortest), space.longest);
    }

    // Gates and norms the read values. Transformers' modules without a norm round silu(gate) first.
    void finish_row(const Recurrent& space, float* x, const Value* gate, int64_t width, Value* __restrict out) const {
        if (space.norm && space.norms_first) norm_groups(space, x, width);
        if (space.norm) open_groups(x, gate, width, [](float opening) { return opening; });
        else open_groups(x, gate, width, [](float opening) { return rounded(opening); });
        if (space.norm && !space.norms_first) norm_groups(space, x, width);
        for (int64_t i = 0; i < width; i++) out[i] = narrow(x[i]);
    }

    // x * silu(gate), in place.
    template <class Round>
    static void open_groups(float* __restrict x, const Value* __restrict gate, int64_t width, const Round& round) {
        float below[PIECE];
        for (int64_t first = 0; first < width; first += PIECE) {
            const int64_t count = std::min(PIECE, width - first);
            denominators(gate + first, count, below);
            for (int64_t i = 0; i < count; i++) x[first + i] *= round(widen(gate[first + i]) / below[i]);
        }
    }

    // Norms x in place, group by group.
    void norm_groups(const Recurrent& space, float* __restrict x, int64_t width) const {
        const Value* __restrict weight = space.norm;
        for (int64_t first = 0; first < width; first += space.group) {
            const float mean = sum_of_squares(x + first, space.group) / float(space.group);
            const float factor = 1 / std::sqrt(mean + float(m.norm_epsilon));
            for (int64_t i = first; i < first + space.group; i++) x[i] = widen(weight[i]) * (x[i] * factor);
        }
    }

    std::vector<float> values, decays, read;
};

}  // namespace
