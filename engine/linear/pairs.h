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
    template <int ROWS> using Sums = __m512[ROWS][VECTORS];

    const Input* inputs(const Product& p, int64_t row, int64_t) { return p.x + row * p.in_features; }

    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features;
        Sums<ROWS> sums;
        multiply(p.weights + panel * PANEL * K, x, K, K, sums);
        for (int v = 0; v < VECTORS; v++) {
            const Outputs outputs(p, panel * PANEL + v * Outputs::COUNT);
            for (int r = 0; r < ROWS; r++) outputs.put(row + r, sums[r][v]);
        }
    }

    template <int ROWS> static void tile_of_run(
        const Product& p, const uint16_t* w, const Input* x, int64_t row, const Run& run) {
        Sums<ROWS> sums;
        multiply(w, x, p.in_features, run.count, sums);
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) Outputs::add(run, row + r, v * Outputs::COUNT, sums[r][v]);
    }

    static void put_totals(const Product& p, const float* totals, int64_t row, int64_t end, int64_t panel) {
        Outputs::put_totals(p, totals, row, end, panel);
    }

  private:
    static __m512bh load(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

    // The sums over `count` weights of a panel, and as many inputs of each row, which lie `stride` apart.
    template <int ROWS>
    static void multiply(const uint16_t* w, const Input* x, int64_t stride, int64_t count, Sums<ROWS>& sums) {
        for (auto& of_row : sums)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < count; k += 2, w += 2 * PANEL) {
            const __m512bh weights[VECTORS] = {load(w), load(w + 32), load(w + 64), load(w + 96)};
            for (int r = 0; r < ROWS; r++) {
                const auto inputs = (__m512bh)_mm512_set1_epi32(*(const int32_t*)(x + r * stride + k));
                for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights[v], inputs);
            }
        }
    }
};

}  // namespace
