// A tile by AVX512-BF16's products of pairs: inputs and weights are read as they are.

#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

#include "product.h"

namespace {

struct Pairs {
    static constexpr int LANES = 16, VECTORS = 4;
    using Input = uint16_t;

    const Input* inputs(const Product& p, int64_t row, int64_t) { return p.x + row * p.in_features; }

    static __m512bh load(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

    static __m512 widen(__m256i bf16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
    }

    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features, N = p.out_features;
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
            const int64_t n = panel * PANEL + v * LANES;
            const int64_t left = std::clamp<int64_t>(N - n, 0, LANES);
            const auto mask = __mmask16((1u << left) - 1);
            const __m512 bias = p.bias ? widen(_mm256_maskz_loadu_epi16(mask, p.bias + n)) : _mm512_setzero_ps();
            for (int r = 0; r < ROWS; r++) {
                const __m512 sum = p.bias ? _mm512_add_ps(sums[r][v], bias) : sums[r][v];
                _mm256_mask_storeu_epi16(p.out + (row + r) * N + n, mask, (__m256i)_mm512_cvtneps_pbh(sum));
            }
        }
    }
};

}  // namespace
