// The scales of a panel's groups, and their minima: the values of code 0. A weight whose scales and minima are all
// float16 numbers stores them as such, since few rows take as long as reading the weight; any other as float32.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../devices/cpu/attention/simd.h"

namespace {

// Returns a finite float16 value as float32.
inline float widen_half(uint16_t half) {
    const uint32_t bits = (half & 0x8000u) << 16 | (half & 0x7fffu) << 13;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value * 0x1p112f;
}

// Loads finite float16 values.
inline Vec widen_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec values;
    for (int i = 0; i < LANES; i++) values[i] = widen_half(from[i]);
    return values;
#endif
}

class Scales {
  public:
    // `values` and `minima` are [group][64], each of `bytes` bytes; `minima` is null for none. The others are the UNIT,
    // the CENTER and the OFFSET of the codes' format.
    Scales(const char* values, const char* minima, int64_t bytes, float unit, float center, float offset)
        : values(values), minima(minima), bytes(bytes), unit(unit), center(center), offset(offset) {}

    // Returns the scales and minima without the first `n`.
    Scales from(int64_t n) const {
        return {values + n * bytes, minima ? minima + n * bytes : nullptr, bytes, unit, center, offset};
    }

    // Returns whether `offsets` are not all 0.
    bool have_offsets() const { return minima || offset; }

    // Returns, for LANES outputs from `n` on, the factors of the sums of the kernel's values times inputs.
    [[gnu::always_inline]] Vec factors(int64_t n) const { return load_from(values, n) * unit; }

    // Returns the scale of output `n`.
    float scale(int64_t n) const {
        return bytes == 2 ? widen_half(((const uint16_t*)values)[n]) : ((const float*)values)[n];
    }

    // Returns, for the same outputs, the factors of the sum of inputs: the values of code CENTER.
    [[gnu::always_inline]] Vec offsets(int64_t n) const {
        const Vec scales = load_from(values, n);
        return minima ? fused(scales, splat(center), load_from(minima, n)) : scales * -offset;
    }

  private:
    [[gnu::always_inline]] Vec load_from(const char* from, int64_t n) const {
        return bytes == 2 ? widen_halves((const uint16_t*)from + n) : load((const float*)from + n);
    }

    const char *values, *minima;
    int64_t bytes;
    float unit, center, offset;
};

}  // namespace
