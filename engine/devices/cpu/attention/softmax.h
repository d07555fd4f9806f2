// The online softmax over the tiles of a context (Milakov and Gimelshein, 2018; FlashAttention, 2022).
#pragma once

#include <algorithm>

#include "pack.h"

constexpr float LOG2_E = 1.4426950408889634f;

// The conversion of raw scores to base-2 logarithms of weights.
struct ScoreScale {
    float scale;   // applied to q.k, in units of log2
    float inner;   // soft cap: 2 log2(e) scale / cap, or 0 for none
    float capped;  // soft cap: log2(e) cap

    ScoreScale(float qk_scale, float softcap) {
        inner = softcap > 0 ? 2 * LOG2_E * qk_scale / softcap : 0;
        capped = LOG2_E * softcap;
        scale = softcap > 0 ? 1 : qk_scale * LOG2_E;
    }

    Vec cap(Vec score) const {  // cap * tanh(score * scale / cap)
        Vec x = max(-max(-(score * inner), splat(-40.0f)), splat(-40.0f));
        return capped * (1.0f - 2.0f / (exp2(x) + 1.0f));
    }
};

// Running results of some query rows, each `stride` floats: output [width], partial sums of weights [LANES], maximum
// [LANES, the first used].
struct RowState {
    float* data;
    int width;

    static int stride(int width) { return width + 2 * LANES; }
    int stride() const { return stride(width); }
    float* output(int row) const { return data + int64_t(row) * stride(); }
    float* sums(int row) const { return output(row) + width; }
    float& maximum(int row) const { return output(row)[width + LANES]; }

    void clear(int rows) const {
        memset(data, 0, int64_t(rows) * stride() * sizeof(float));
        for (int r = 0; r < rows; r++) maximum(r) = MINUS_INFINITY;
    }
};

// Sets the scores of the keys that a row does not see to minus infinity.
template <int VECTORS> static inline void hide(float* scores, uint64_t seen) {
    for (int v = 0; v < VECTORS; v++, scores += LANES, seen >>= LANES)
        store(scores, lanes_of(seen) ? load(scores) : splat(MINUS_INFINITY));
}

// One step of the online softmax: a block of rows over the scores of a tile's first GROUPS * 16 keys. Row r sees the
// keys whose bits in seen[r] are set. Writes their weights, and 0 for the other keys; updates the rows' maxima and
// sums; writes to `rescale` the factors for the rows' earlier outputs.
template <class Math, int GROUPS>
static void softmax_block(int rows, float* scores, const uint64_t* seen, const ScoreScale& how, const RowState& state,
                          int first_row, typename Math::Word* weights, float* rescale) {
    constexpr int VECTORS = GROUPS * 16 / LANES;
    constexpr uint64_t ALL = ~uint64_t(0) >> (64 - GROUPS * 16);
    alignas(64) float drop[MOST_ROWS] = {};
    float subtract[MOST_ROWS];
    // The rows' maxima first: in one loop, a row's weights would wait for its maximum.
    for (int r = 0; r < rows; r++) {
        float* const of_row = scores + r * TILE;
        if (how.inner > 0)
            for (int v = 0; v < VECTORS; v++) store(of_row + v * LANES, how.cap(load(of_row + v * LANES)));
        if (seen[r] != ALL) hide<VECTORS>(of_row, seen[r]);
        Vec largest = load(of_row);
        for (int v = 1; v < VECTORS; v++) largest = max(largest, load(of_row + v * LANES));
        const float before = state.maximum(first_row + r);
        const float maximum = std::max(before, largest_lane(largest) * how.scale);
        state.maximum(first_row + r) = maximum;
        // If the row has seen no key yet, any finite number gives weights of 0.
        subtract[r] = maximum == MINUS_INFINITY ? 0 : maximum;
        drop[r] = before - subtract[r];
    }
    for (int i = 0; i < rows; i += LANES) store(drop + i, exp2(load(drop + i)));
    for (int r = 0; r < rows; r++) {
        Vec weight[VECTORS], total{};
        for (int v = 0; v < VECTORS; v++)
            weight[v] = load(scores + r * TILE + v * LANES) * how.scale - subtract[r];
        to_exp2<Math::COARSE>(weight);
        for (int v = 0; v < VECTORS; v++) {
            total = total + weight[v];
            Math::store_weights(weights + r * TILE + v * LANES / Math::PER_WORD, weight[v]);
        }
        rescale[r] = drop[r];
        float* sums = state.sums(first_row + r);
        store(sums, load(sums) * rescale[r] + total);
    }
}

template <class Math, class... Args>
static inline void softmax_of(int groups, Args... args) {
    switch (groups) {
        case 1: return softmax_block<Math, 1>(args...);
        case 2: return softmax_block<Math, 2>(args...);
        case 3: return softmax_block<Math, 3>(args...);
        default: return softmax_block<Math, 4>(args...);
    }
}

// For rows over codes: `softmax_of` leaves weights in float32, and `weigh` multiplies them by the values' scales.
struct UnscaledWeights : FloatMath {
    static constexpr bool COARSE = true;  // the values' codes are far coarser
};

template <class Math>
static inline float weigh(const float* weights, const float* scales, int count, typename Math::Word* to) {
    if constexpr (Math::WHOLE) {
        alignas(64) float weighed[TILE];
        for (int k = 0; k < count; k += LANES) store(weighed + k, load(weights + k) * load(scales + k));
        return to_whole(weighed, count, (int16_t*)to);
    } else {
        for (int k = 0; k < count; k += LANES)
            Math::store_weights(to + k / Math::PER_WORD, load(weights + k) * load(scales + k));
        return 1;
    }
}

// Returns 1 / the sum of a row's weights, relative to its maximum. A sink adds a weight and may raise the maximum.
static inline float inverse_sum(const RowState& state, int row, const float* sink) {
    const float sum = sum_of_lanes(load(state.sums(row)));
    if (!sink) return 1 / sum;
    const float score = *sink * LOG2_E, maximum = std::max(state.maximum(row), score);
    const Vec shares = exp2(splat(state.maximum(row) - maximum)), sinks = exp2(splat(score - maximum));
    return shares[0] / (sum * shares[0] + sinks[0]);
}

// Writes the row's output divided by the sum of its weights.
static inline void write_output(const float* output, float inverse_sum, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d++) to[d] = output[d] * inverse_sum;
}
static inline void write_output(const float* output, float inverse_sum, int head_dim, uint16_t* to) {
    for (int d = 0; d < head_dim; d++) to[d] = float_to_bf16(output[d] * inverse_sum);
}

// Merges a later split's results into the earlier splits' results.
static __attribute__((noinline)) void fold(const RowState& into, const RowState& from, int rows) {
    for (int r = 0; r < rows; r++) {
        const float largest = std::max(into.maximum(r), from.maximum(r));
        if (largest == MINUS_INFINITY) continue;
        const Vec a = exp2(splat(into.maximum(r) - largest)), b = exp2(splat(from.maximum(r) - largest));
        float *to = into.output(r), *add = from.output(r);
        for (int i = 0; i < into.width + LANES; i += LANES)
            store(to + i, load(to + i) * a + load(add + i) * b);
        into.maximum(r) = largest;
    }
}
