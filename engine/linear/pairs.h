// A tile for AVX512-BF16, which multiplies pairs of bfloat16: inputs and weights need no conversion.

#pragma once

#include <cstdint>
#include <immintrin.h>

#include "outputs.h"
#include "product.h"
#include "vector_tiles.h"

namespace {

struct Pairs : VectorTiles<Pairs, uint16_t> {
    static constexpr int VECTORS = PANEL / Outputs::COUNT;

    const Input* inputs(const Product& p, int64_t row, int64_t) { return p.x + row * p.in_features; }

    static __m512bh load(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features;
        const uint16_t* w = p.weights + panel * PANEL * K;
        __m512 sums[ROWS][VECTORS];
        for (auto& of_row : sums)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < K; k += 2, w += 2 * PANEL) {
            const __m512bh weights[VECTORS] = {load(w), load(w + 32), load(w + 64), load(w + 96)};
            for (int r = 0; r < ROWS; r++) {
                const auto inputs = (__m512bh)_mm512_set1_epi32(*(const int32_t*)(x + r * K + k));
                for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights[v], inputs);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const Outputs outputs(p, panel * PANEL + v * Outputs::COUNT);
            for (int r = 0; r < ROWS; r++) outputs.put(row + r, sums[r][v]);
        }
    }
};

}  // namespace
