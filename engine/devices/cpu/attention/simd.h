// Vectors of floats by GCC's vector extensions: AVX-512, AVX2, NEON or other targets.
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

#if defined(__AVX512F__) || defined(__AVX512VNNI__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef int16_t ShortVec __attribute__((vector_size(LANES * 4)));

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

static inline Vec load(const float* from) {
    Vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }

static inline IntVec load(const int32_t* from) {
    IntVec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(int32_t* to, IntVec v) { memcpy(to, &v, sizeof v); }

static inline IntVec widen(const int8_t* from) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    IntVec v;
    for (int i = 0; i < LANES; i++) v[i] = from[i];
    return v;
#endif
}

// Loads bfloat16 values as float32.
static inline Vec widen(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
    IntVec v;
    for (int i = 0; i < LANES; i++) v[i] = from[i] << 16;
    return (Vec)v;
#endif
}

// a * b + c, rounded once where the CPU can, wherever it is inlined.
static inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline Vec splat(float x) { return x - Vec{}; }

// If the first operand is NaN, the result is NaN.
static inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)b, (__m512)a);
#else
    return b > a ? b : a;
#endif
}

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
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
#endif
}

// Returns all ones in the lanes whose bits are set.
static inline IntVec lanes_of(uint64_t bits) {
    IntVec lane;
    for (int i = 0; i < LANES; i++) lane[i] = 1 << i;
    return ((int32_t(bits) - IntVec{}) & lane) != 0;
}

// x = 2^x for x < 120: exactly 1 at 0, exactly 0 far below. Relative error 2e-7, or 2e-4 in the coarse form. Vectors go
// through each step together, since a step waits for the one before.
template <bool coarse, int COUNT> static inline void to_exp2(Vec (&x)[COUNT]) {
    const auto each = [](const auto& step) {
        for (int v = 0; v < COUNT; v++) step(v);
    };
    Vec whole[COUNT], p[COUNT];
#if defined(__AVX512DQ__)
    // The remainder of minus infinity is 0, so it gives 0 without an underflow, which takes a hundred cycles.
    each([&](int v) {
        const Vec part = (Vec)_mm512_reduce_ps((__m512)x[v], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        whole[v] = x[v] - part, x[v] = part;
    });
#else
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    IntVec tiny[COUNT];
    each([&](int v) { tiny[v] = x[v] < splat(-126.0f); });
    each([&](int v) { x[v] = max(x[v], splat(-126.0f)); });
    each([&](int v) { whole[v] = x[v] + shifter; });
    each([&](int v) { x[v] -= whole[v] - shifter; });
#endif
    const auto begin = [&](float a, float b) { each([&](int v) { p[v] = splat(a) * x[v] + b; }); };
    const auto add = [&](float next) { each([&](int v) { p[v] = p[v] * x[v] + next; }); };
    if (coarse) {  // least maximum of the relative error on [-1/2, 1/2] with p(0) = 1
        begin(5.332748e-2f, 2.424317e-1f);
        add(6.9370506e-1f);
    } else {  // from Cephes' exp2f
        begin(1.535336188319500e-4f, 1.339887440266574e-3f);
        add(9.618437357674640e-3f);
        add(5.550332471162809e-2f);
        add(2.402264791363012e-1f);
        add(6.931472028550421e-1f);
    }
    add(1.0f);
#if defined(__AVX512DQ__)
    each([&](int v) { x[v] = (Vec)_mm512_scalef_ps((__m512)p[v], (__m512)whole[v]); });
#else
    each([&](int v) { x[v] = tiny[v] ? Vec{} : (Vec)((IntVec)p[v] + ((IntVec)whole[v] << 23)); });
#endif
}

static inline Vec exp2(Vec x) {
    Vec vectors[] = {x};
    to_exp2<false>(vectors);
    return vectors[0];
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
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
