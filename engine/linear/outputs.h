// Writes the sums of 16 outputs on CPUs with AVX512-BF16: biased and rounded to bfloat16, or added to totals.

#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

#include "product.h"

namespace {

class Outputs {
  public:
    static constexpr int COUNT = 16;

    // The product's outputs n to n + 15, masked at its last output.
    Outputs(const Product& product, int64_t n)
        : p(product), n(n), mask((1u << std::clamp<int64_t>(p.out_features - n, 0, COUNT)) - 1),
          bias(p.bias ? widen(_mm256_maskz_loadu_epi16(mask, p.bias + n)) : _mm512_setzero_ps()) {}

    void put(int64_t row, __m512 sums) const {
        const auto rounded = _mm512_cvtneps_pbh(p.bias ? _mm512_add_ps(sums, bias) : sums);
        _mm256_mask_storeu_epi16(p.out + row * p.out_features + n, mask, (__m256i)rounded);
    }

    // Also writes the next 16 outputs, all in one cache line where that is possible.
    void put(int64_t row, __m512 sums, __m512 sums_after) const {
        if (!p.bias && n + 2 * COUNT <= p.out_features) {
            const auto rounded = _mm512_cvtne2ps_pbh(sums_after, sums);
            return _mm512_storeu_si512(p.out + row * p.out_features + n, (__m512i)rounded);
        }
        put(row, sums);
        if (n + COUNT < p.out_features) Outputs(p, n + COUNT).put(row, sums_after);
    }

  private:
    static __m512 widen(__m256i bf16) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
    }

    const Product& p;
    const int64_t n;
    const __mmask16 mask;
    const __m512 bias;
};

}  // namespace
