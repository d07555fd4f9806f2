// Quantized weights, and how they become bfloat16, which holds every code's value exactly.
//
// They are packed in panels of 64 outputs, as bfloat16 ones are: [n / 64][k / (2 c)][64][2] words of 16 bits, each with
// c = 2 or 4 codes, the lowest first: those of one output for every second k. So each code of a vector of words
// belongs into the same place of another vector of pairs.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512BW__) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "product.h"

namespace {

enum Format : int64_t { INT8, INT4, FP8, MXFP4 };  // in the order of Python's FORMATS

constexpr int64_t WORDS = 2 * PANEL;  // of a panel, for 2 c inputs

inline uint16_t high_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return uint16_t(bits >> 16);
}

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
// By a table of all codes. The index's fifth bit is a neighbour's, so that the table has every value twice.
inline void look_up(const uint16_t* words, uint16_t* to, const uint16_t* values) {
    const auto table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values));
    for (int64_t j = 0; j < WORDS; j += 32) {
        const auto codes = _mm512_loadu_si512(words + j);
        _mm512_store_si512(to + j, _mm512_permutexvar_epi16(codes, table));
        _mm512_store_si512(to + j + WORDS, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
        _mm512_store_si512(to + j + 2 * WORDS, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
        _mm512_store_si512(to + j + 3 * WORDS, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
    }
}
#else
inline void look_up(const uint16_t* words, uint16_t* to, const uint16_t* values) {
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < WORDS; j++) to[i * WORDS + j] = values[words[j] >> 4 * i & 15];
}
#endif

// Of each format: how many codes a word has, and how WORDS words become as many times WORDS bfloat16.

struct Int4 {
    static constexpr int CODES = 4;

    static void expand(const uint16_t* words, uint16_t* to) {
        static constexpr uint16_t VALUES[] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                              0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        look_up(words, to, VALUES);  // -8 to 7
    }
};

struct Mxfp4 {
    static constexpr int CODES = 4;

    static void expand(const uint16_t* words, uint16_t* to) {
        static constexpr uint16_t VALUES[] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                              0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
        look_up(words, to, VALUES);  // 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero
    }
};

// Its values are 2^24 times the codes: these are converted from the highest byte of an int32.
struct Int8 {
    static constexpr int CODES = 2;

    static void expand(const uint16_t* words, uint16_t* to) {
#if defined(__AVX512BW__) && defined(__AVX512BF16__)
        const auto second_byte = _mm512_set1_epi32(0x01808080), third_byte = _mm512_set1_epi32(0x02808080);
        const auto in_lanes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
        const auto second = _mm512_or_si512(second_byte, in_lanes), third = _mm512_or_si512(third_byte, in_lanes);
        for (int64_t j = 0; j < WORDS; j += 32) {
            const auto codes = _mm512_loadu_si512(words + j);
            const auto high = _mm512_and_si512(codes, _mm512_set1_epi32(int32_t(0xff000000)));
            _mm512_store_si512(to + j, pair(_mm512_slli_epi32(codes, 24), _mm512_shuffle_epi8(codes, third)));
            _mm512_store_si512(to + j + WORDS, pair(_mm512_shuffle_epi8(codes, second), high));
        }
#else
        for (int64_t j = 0; j < WORDS; j++) {
            to[j] = high_half(float(int32_t(uint32_t(words[j]) << 24)));
            to[WORDS + j] = high_half(float(int32_t(uint32_t(words[j] >> 8) << 24)));
        }
#endif
    }

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
    // Two vectors of int32, as bfloat16 side by side.
    static __m512i pair(__m512i low, __m512i high) {
        const auto downwards = _mm512_set4_epi32(0x80800f0e, 0x80800b0a, 0x80800706, 0x80800302);
        const auto first = _mm512_castps_si512(_mm512_cvtepi32_ps(low));
        const auto second = _mm512_castps_si512(_mm512_cvtepi32_ps(high));
        return _mm512_mask_shuffle_epi8(second, 0x3333333333333333, first, downwards);
    }
#endif
};

// Its values are 1/256 of the format's, as they come out of float16, whose exponent has another bias.
struct Fp8 {
    static constexpr int CODES = 2;

    static void expand(const uint16_t* words, uint16_t* to) {
#if defined(__AVX512BW__) && defined(__AVX512BF16__)
        for (int64_t j = 0; j < WORDS; j += 32) {
            const auto codes = _mm512_loadu_si512(words + j);
            _mm512_store_si512(to + j, narrow(_mm512_slli_epi16(codes, 8)));
            _mm512_store_si512(to + j + WORDS, narrow(codes));
        }
#else
        for (int64_t j = 0; j < WORDS; j++) {
            to[j] = value(words[j] & 255);
            to[WORDS + j] = value(words[j] >> 8);
        }
#endif
    }

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
    static __m512i narrow(__m512i high_bytes) {
        const auto halves = _mm512_and_si512(_mm512_srai_epi16(high_bytes, 1), _mm512_set1_epi16(int16_t(0xbf80)));
        const auto low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        const auto high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
#else
    static uint16_t value(uint32_t code) {
        const uint32_t magnitude = code & 127, sign = (code & 128) << 8;
        if (magnitude < 8) return uint16_t(high_half(float(magnitude) / (1 << 17)) | sign);
        return uint16_t(((magnitude << 4) + (112 << 7)) | sign);
    }
#endif
};

}  // namespace
