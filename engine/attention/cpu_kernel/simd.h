// Vectors of floats through GCC's vector extensions: AVX-512, AVX2, NEON or whatever the target has.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BF16_PAIRS 1
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

static inline Vec load(const float* from) {
    Vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }

static inline Vec splat(float x) { return x - Vec{}; }

// A NaN in the first operand stays one.
static inline Vec max(Vec a, Vec b) { return b > a ? b : a; }

static inline float largest_lane(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float largest = v[0];
    for (int i = 1; i < LANES; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
#endif
}

static inline float sum_of_lanes(Vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

static inline IntVec lane_indices() {
    IntVec v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// 2^x for x < 120, exactly 1 at 0 and exactly 0 below -126. Polynomial of Cephes' exp2f.
static inline Vec exp2(Vec x) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Vec clamped = max(x, splat(-126.0f));
    Vec shifted = clamped + shifter;
    Vec f = clamped - (shifted - shifter);
    Vec p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    Vec result = (Vec)((IntVec)p + ((IntVec)shifted << 23));
    return x < splat(-126.0f) ? Vec{} : result;
}

static inline float bf16_to_float(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t float_to_bf16(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

template <class Element> static inline Element from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline uint16_t from_float<uint16_t>(float x) { return float_to_bf16(x); }
