// Attention that reads int8 codes as stored, four to a word, by AVX512-VNNI. All sums are exact, so they equal the sums
// over packed codes.
#pragma once

#include "pack.h"

constexpr int MAX_BYTE_ROWS = 4;  // with more rows, packed codes are faster

// A query row's numbers as bytes: each is 256 * high + low. Codes are multiplied as unsigned numbers, 128 too large.
struct ByteQuery {
    const int8_t *high, *low;
    int32_t excess;  // excess of the sums: 128 times the sum of the numbers

    ByteQuery(const int16_t* numbers, int count, int8_t* bytes) : high(bytes), low(bytes + count), excess(0) {
        for (int d = 0; d < count; d++) {
            bytes[d] = int8_t((numbers[d] + 128) >> 8);
            bytes[count + d] = int8_t(numbers[d]);
            excess += 128 * numbers[d];
        }
    }
};

#if defined(__AVX512VNNI__)
constexpr bool READS_CODES = true;

// sum + products of bytes with signed bytes. Vectors are int32 throughout, since g++ else copies the sums at each step.
static inline IntVec add_products(IntVec sum, __m512i bytes, __m512i signed_bytes) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, bytes, signed_bytes);
}

// Calls part(count, first) for one or two of the rows at a time: the sums of two fit the registers.
template <class Part> static inline void each_pair(int rows, const Part& part) {
    for (int r = 0; r + 1 < rows; r += 2) part(std::integral_constant<int, 2>(), r);
    if (rows % 2) part(std::integral_constant<int, 1>(), rows - 1);
}

// Returns 16 bytes of each of the rows 0, 4, 8 and 12, one row in each 128-bit lane.
static inline __m512i four_rows(const Int8* const* rows, int64_t offset) {
    const auto bytes = [&](int k) { return _mm_loadu_si128((const __m128i*)(rows[k] + offset)); };
    __m512i v = _mm512_castsi128_si512(bytes(0));
    v = _mm512_inserti32x4(v, bytes(4), 1);
    v = _mm512_inserti32x4(v, bytes(8), 2);
    return _mm512_inserti32x4(v, bytes(12), 3);
}

// Sums each 128-bit lane's words; v[i] has the lanes of keys i, i + 4, i + 8 and i + 12. Returns 16 keys' sums.
static inline IntVec sums_of_lanes(const IntVec* sums) {
    const auto* v = (const __m512i*)sums;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    const __m512i v01 = add(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i v23 = add(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return (IntVec)add(_mm512_unpacklo_epi64(v01, v23), _mm512_unpackhi_epi64(v01, v23));
}

// scores[R][16 of TILE] of 16 keys.
template <int R>
static __attribute__((noinline)) void score_16(const Int8* const* keys, int64_t offset, int head_dim,
                                               const ByteQuery* queries, const float* units, float* scores) {
    IntVec high[R][4] = {}, low[R][4] = {};
    asm volatile("" : : "r"(keys) : "memory");  // keeps g++ from holding the 16 pointers in vector registers
    for (int d = 0; d < head_dim; d += 16) {
        const auto query = [&](const int8_t* bytes) {
            return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(bytes + d)));
        };
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i codes = _mm512_xor_si512(four_rows(keys + i, offset + d), _mm512_set1_epi8(-128));
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
                high[r][i] = add_products(high[r][i], codes, query(queries[r].high));
                low[r][i] = add_products(low[r][i], codes, query(queries[r].low));
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        IntVec sums[4];
        for (int i = 0; i < 4; i++) sums[i] = (high[r][i] << 8) + low[r][i];
        const IntVec exact = sums_of_lanes(sums) - queries[r].excess;
        store(scores + r * TILE, __builtin_convertvector(exact, Vec) * units[r]);
    }
}

// scores[rows][TILE] of the first `count` keys of a tile; `count` and head_dim are multiples of 16.
static void score_codes(const Int8* const* keys, int64_t offset, int head_dim, int count, int rows,
                        const ByteQuery* queries, const float* units, Sweep<Int8>& sweep, float* scores) {
    for (int first = 0; first < count; first += 16) {
        sweep.fetch();
        each_pair(rows, [&](auto pair, int r) {
            score_16<pair>(keys + first, offset, head_dim, queries + r, units + r, scores + r * TILE + first);
        });
    }
}

// A row's weights of a tile as bytes. Weights are not negative, and each is 256 * high + low.
struct ByteWeights {
    uint8_t high[TILE], low[TILE];

    void take(const int16_t* numbers) {
        for (int k = 0; k < TILE; k++) high[k] = uint8_t(numbers[k] >> 8), low[k] = uint8_t(numbers[k]);
    }
};

// to[64] += unit * sums; 128-bit lane n of sums[i] has the sums 16 n + 4 i to 16 n + 4 i + 3.
static inline void add_lanes(const IntVec* sums, float unit, float* to) {
    const auto* v = (const __m512i*)sums;
    const __m512i even01 = _mm512_shuffle_i32x4(v[0], v[1], 0x88), odd01 = _mm512_shuffle_i32x4(v[0], v[1], 0xdd);
    const __m512i even23 = _mm512_shuffle_i32x4(v[2], v[3], 0x88), odd23 = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
    const auto add = [&](int n, __m512i in_order) {
        const Vec numbers = __builtin_convertvector((IntVec)in_order, Vec);
        store(to + 16 * n, fused(numbers, splat(unit), load(to + 16 * n)));
    };
    add(0, _mm512_shuffle_i32x4(even01, even23, 0x88));
    add(1, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    add(2, _mm512_shuffle_i32x4(even01, even23, 0xdd));
    add(3, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
}

// sums[R][64] += units[R] * weights * 64 codes of each of the first `count` values; `count` is a multiple of four.
template <int R>
static __attribute__((noinline)) void add_weighed(const Int8* const* values, int64_t offset, int count,
                                                  const ByteWeights* weights, const float* units, float* sums,
                                                  int64_t sums_stride) {
    IntVec high[R][4] = {}, low[R][4] = {};
    for (int k = 0; k < count; k += 4) {
        const auto row = [&](int i) { return _mm512_loadu_si512(values[k + i] + offset); };
        const __m512i a = row(0), b = row(1), c = row(2), d = row(3);
        const __m512i ab[] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
        const __m512i cd[] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
        const __m512i codes[] = {_mm512_unpacklo_epi16(ab[0], cd[0]), _mm512_unpackhi_epi16(ab[0], cd[0]),
                                 _mm512_unpacklo_epi16(ab[1], cd[1]), _mm512_unpackhi_epi16(ab[1], cd[1])};
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
            const auto four = [&](const uint8_t* bytes) {
                int32_t word;
                memcpy(&word, bytes + k, sizeof word);
                return _mm512_set1_epi32(word);
            };
            const __m512i high_bytes = four(weights[r].high), low_bytes = four(weights[r].low);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                high[r][i] = add_products(high[r][i], high_bytes, codes[i]);
                low[r][i] = add_products(low[r][i], low_bytes, codes[i]);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        IntVec v[4];
        for (int i = 0; i < 4; i++) v[i] = (high[r][i] << 8) + low[r][i];
        add_lanes(v, units[r], sums + r * sums_stride);
    }
}

// sums[rows][head_dim] += units[rows] * weights[rows][TILE words] * codes of the first `count` values of a tile. The
// weights are int16, at the start of a row's words. head_dim is a multiple of 64.
static void add_codes(const Int8* const* values, int64_t offset, int head_dim, int count, int rows,
                      const int32_t* weights, const float* units, Sweep<Int8>& sweep, float* sums,
                      int64_t sums_stride) {
    ByteWeights bytes[MAX_BYTE_ROWS];
    for (int r = 0; r < rows; r++) bytes[r].take((const int16_t*)(weights + r * TILE));
    for (int column = 0; column < head_dim; column += 64) {
        sweep.fetch();
        each_pair(rows, [&](auto pair, int r) {
            add_weighed<pair>(values, offset + column, (count + 3) / 4 * 4, bytes + r, units + r,
                              sums + r * sums_stride + column, sums_stride);
        });
    }
}
#else
constexpr bool READS_CODES = false;
#endif
