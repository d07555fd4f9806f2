// The product kernel: a block of query rows times a tile of packed keys or values.
//
// Every row goes through the same operations in the same order, whichever other rows are in its block. So a row's
// result has the same bits alone or in a batch, in decode or in a prefill chunk.
#pragma once

#include <type_traits>

#include "simd.h"

constexpr int TILE = 64;        // keys
constexpr int VECTOR_ROWS = 6;  // query rows whose sums fit the vector registers, with BLOCK_COLS vectors each
constexpr int MOST_ROWS = 16;   // most query rows that are multiplied together
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int BLOCK_COLS = 2;
#else
constexpr int BLOCK_COLS = 4;
#endif

struct NoRegisters {};  // a thread needs none beside the vector registers

// The multiply-add, with sums in float32. A word is one float32 factor, or two bfloat16 factors if the CPU multiplies
// pairs (AVX512-BF16).
struct FloatMath {
    typedef float Word;
    typedef Vec Sum;
    static constexpr int PER_WORD = 1;
    static constexpr bool COARSE = false;
    static constexpr bool WHOLE = false;
    static constexpr bool TILES = false;      // whether tile registers multiply
    static constexpr int ROWS = VECTOR_ROWS;  // query rows multiplied together
    static constexpr int DEPTH = 1;           // number of words that a product's depth is a multiple of
    using Registers = NoRegisters;
    static inline Vec multiply_add(Vec sum, const float* a, Vec b) { return sum + *a * b; }
    static inline Vec load_words(const float* from) { return load(from); }
    static inline Vec load_words(const uint16_t* from) { return widen(from); }
    static inline void store_weights(float* to, Vec weights) { store(to, weights); }
    template <bool ADD> static inline Vec first(const float* sums, float scale) {
        return ADD ? load(sums) * scale : Vec{};
    }
    template <bool ADD> static inline Vec last(Vec sum, const float*, float) { return sum; }
};

#if defined(BF16_PAIRS)
struct PairMath : FloatMath {
    typedef uint32_t Word;
    static constexpr int PER_WORD = 2;
    static constexpr bool COARSE = true;  // weights are rounded to bfloat16 anyway
    static inline Vec multiply_add(Vec sum, const uint32_t* a, __m512i b) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*a), (__m512bh)b);
    }
    static inline __m512i load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
    static inline void store_weights(uint32_t* to, Vec weights) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
    }
};
#endif

// Exact sums in int32 of products of int16 with int8 codes, two pairs of factors in a word. A float32 row becomes int16
// with a unit, which is the `scale` of `product`: sums = sums + unit * a * b, or without the first term.
struct WholeMath {
    typedef int32_t Word;
    typedef IntVec Sum;
    static constexpr int PER_WORD = 2;
    static constexpr bool WHOLE = true;
    static constexpr bool TILES = false;
    static constexpr int ROWS = VECTOR_ROWS, DEPTH = 1;
    using Registers = NoRegisters;
    static inline IntVec multiply_add(IntVec sum, const int32_t* a, IntVec b) {
#if defined(__AVX512VNNI__)
        return (IntVec)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(*a), (__m512i)b);
#elif defined(__AVX512BW__)
        return sum + (IntVec)_mm512_madd_epi16(_mm512_set1_epi32(*a), (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return sum + (IntVec)_mm256_madd_epi16(_mm256_set1_epi32(*a), (__m256i)b);
#else
        return sum + int32_t(int16_t(*a)) * (b << 16 >> 16) + (*a >> 16) * (b >> 16);
#endif
    }
    static inline IntVec load_words(const int32_t* from) { return load(from); }
    template <bool ADD> static inline IntVec first(const float*, float) { return IntVec{}; }
    template <bool ADD> static inline Vec last(IntVec sum, const float* sums, float unit) {
        const Vec whole = __builtin_convertvector(sum, Vec);
        return ADD ? fused(whole, splat(unit), load(sums)) : whole * unit;
    }
};

// The rows of a second factor: packed one after another, or read as stored.
template <class Word> struct Packed {
    const Word* words;
    int64_t stride;
    const Word* row(int d) const { return words + d * stride; }
};
template <class Element> struct InPlace {
    const Element* const* rows;
    int64_t offset;
    const Element* row(int d) const { return rows[d] + offset; }
};

// Multiplies each row's vectors by the row's factor, separately from the products, so that all rows are rounded alike.
static __attribute__((noinline)) void rescale_rows(float* rows, int64_t stride, int count, int width,
                                                   const float* factors) {
    for (int r = 0; r < count; r++, rows += stride)
        for (int i = 0; factors[r] != 1 && i < width; i += LANES) store(rows + i, load(rows + i) * factors[r]);
}

// sums[R][C vectors] = scale[R] * sums + a[R][depth] * b[depth][C vectors], or without the first term, for the vectors
// of b from `column` on.
template <class Math, bool ADD, int R, int C, class Rows>
static __attribute__((noinline)) void product(const typename Math::Word* a, int64_t a_stride, const Rows& b, int column,
                                              int depth, const float* scale, float* sums, int64_t sums_stride) {
    typename Math::Sum acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = Math::template first<ADD>(sums + r * sums_stride + c * LANES, ADD ? scale[r] : 0);
    for (int d = 0; d < depth; d++) {
        const auto* row = b.row(d) + column;
        decltype(Math::load_words(row)) words[C];
        for (int c = 0; c < C; c++) words[c] = Math::load_words(row + c * LANES);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                acc[r][c] = Math::multiply_add(acc[r][c], a + r * a_stride + d, words[c]);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float* to = sums + r * sums_stride + c * LANES;
            store(to, Math::template last<ADD>(acc[r][c], to, Math::WHOLE ? scale[r] : 0));
        }
}

template <class Math, bool ADD, int R, class Rows>
static void product_rows(const typename Math::Word* a, int64_t a_stride, const Rows& b, int depth, const float* scale,
                         float* sums, int64_t sums_stride, int vectors) {
    const auto columns = [&](auto count, int c) {
        product<Math, ADD, R, count>(a, a_stride, b, c * LANES, depth, scale, sums + c * LANES, sums_stride);
        return c + count;
    };
    int c = 0;
    while (c + BLOCK_COLS <= vectors) c = columns(std::integral_constant<int, BLOCK_COLS>(), c);
    while (c + 2 <= vectors) c = columns(std::integral_constant<int, 2>(), c);
    while (c < vectors) c = columns(std::integral_constant<int, 1>(), c);
}

template <class Math, bool ADD, class... Args>
static inline void product_of(NoRegisters&, int rows, const Args&... args) {
    switch (rows) {
        case 1: return product_rows<Math, ADD, 1>(args...);
        case 2: return product_rows<Math, ADD, 2>(args...);
        case 3: return product_rows<Math, ADD, 3>(args...);
        case 4: return product_rows<Math, ADD, 4>(args...);
        case 5: return product_rows<Math, ADD, 5>(args...);
        default: return product_rows<Math, ADD, VECTOR_ROWS>(args...);
    }
}
