// Adds the bias to the sums of 16 outputs and stores them as bfloat16, on CPUs with AVX512-BF16.

#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

#include "product.h"

namespace {

class Outputs {
  public:
    static constexpr int COUNT = 16;

    // The product's outputs n to n + 15, as far as it has them.
    Outputs(const Product& product, int64_t n)
        : p(product), n(n), mask((1u << std::clamp<int64_t>(p.out_features - n, 0, COUNT)) - 1),
          bias(p.bias ? widen(_mm256_maskz_loadu_epi16(mask, p.bias + n)) : _mm512_setzero_ps()) {}

    void put(int64_t row, __m512 sums) const {
        const auto rounded = _mm512_cvtneps_pbh(p.bias ? _mm512_add_ps(sums, bias) : sums);
        _mm256_mask_storeu_epi16(p.out + row * p.out_features + n, mask, (__m256i)rounded);
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
