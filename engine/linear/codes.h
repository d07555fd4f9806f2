// Quantized weights, and their expansion to bfloat16, which holds every code's value exactly.
//
// They are packed in panels of 64 outputs, like bfloat16 weights: [n / 64][k / (2 c)][64][2] words of 16 bits, each
// with c = 2 or 4 codes, lowest first; an output's two words have the codes of even and of odd k. So the i-th codes of
// a vector of words become a vector of bfloat16 pairs in the same places.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../devices/cpu/attention/simd.h"
#include "product.h"

namespace {

enum Format : int64_t { INT8, INT4, FP8, MXFP4 };  // in the order of Python's FORMATS

constexpr int64_t WORDS = 2 * PANEL;  // words of a panel for 2 c inputs
constexpr int64_t AHEAD = 1 << 13;    // prefetch distance of codes into the L2 cache, in words: 16 KiB

inline uint16_t high_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return uint16_t(bits >> 16);
}

// The bit position of the K-th input's code within an output's two words.
template <class Codes, int K> constexpr int place = 16 * (K % 2) + 16 / Codes::CODES * (K / 2);

// Each format has: CODES, the number of codes in a word; value and values<I>, the bfloat16 value of the I-th code of
// one word or of a vector of words; floats<K>, the float32 values for the K-th of 2 c inputs, from outputs' two words.
// Quantized formats also have: UNIT, the factor from these values to the format's; CENTER, the stored code whose value
// is 0; and OFFSET, the value of the code that stands for 0 without minima. Integer formats also have: SIGNS, the bits
// to flip for unsigned codes; and ZERO, the unsigned code of 0.

// bfloat16 weights, not quantized.
struct Plain {
    static constexpr int CODES = 1;

    static uint16_t value(uint16_t word, int) { return word; }
#if defined(__AVX512BW__)
    template <int> static __m512i values(__m512i words) { return words; }
#endif
};

template <class Table> struct FourBits {
    static constexpr int CODES = 4;
    static constexpr float UNIT = 1, OFFSET = 0;

    static uint16_t value(uint16_t word, int i) { return Table::VALUES[word >> 4 * i & 15]; }
#if defined(__AVX512BW__)
    // The table index is five bits. The fifth is a bit of the next code, so the table has all values twice.
    template <int I> static __m512i values(__m512i words) {
        const auto table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)Table::VALUES));
        return _mm512_permutexvar_epi16(I ? _mm512_srli_epi16(words, 4 * I) : words, table);
    }
#elif defined(__AVX2__)
    // Looks up the values' low and high bytes separately. An index with bit 7 set gives zero.
    template <int I> static __m256i values(__m256i words) {
        const auto index = _mm256_or_si256(
            _mm256_and_si256(_mm256_srli_epi16(words, 4 * I), _mm256_set1_epi16(15)), _mm256_set1_epi16(int16_t(0x8000)));
        const auto table = _mm256_loadu_si256((const __m256i*)Table::VALUES), byte = _mm256_set1_epi16(0xff);
        const auto low = bytes(_mm256_and_si256(table, byte)), high = bytes(_mm256_srli_epi16(table, 8));
        const auto low_bytes = _mm256_shuffle_epi8(low, index), high_bytes = _mm256_shuffle_epi8(high, index);
        return _mm256_or_si256(low_bytes, _mm256_slli_epi16(high_bytes, 8));
    }

  private:
    // Returns the sixteen bytes, twice.
    static __m256i bytes(__m256i words) {
        const auto packed = _mm256_packus_epi16(words, words);
        return _mm256_permute4x64_epi64(packed, 0x88);
    }
#endif
};

struct Int4 : FourBits<Int4> {  // -8 to 7
    static constexpr int32_t SIGNS = 0, ZERO = 8;
    static constexpr float CENTER = 8;
    static constexpr uint16_t VALUES[] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};

    template <int K> static Vec floats(IntVec words) {
#if defined(__AVX512F__)
        return (Vec)_mm512_permutexvar_ps((__m512i)(words >> place<Int4, K>), (__m512)widen(VALUES));
#else
        return __builtin_convertvector((words ^ int32_t(0x88888888)) << (28 - place<Int4, K>) >> 28, Vec);
#endif
    }
};

// The same codes as numbers from 16 to 31. As bfloat16 these differ only in four bits, so a shift and a mask expand a
// code instead of a table, in three quarters of the time on Intel's CPUs. Scales::offsets takes the excess from the
// sums, so an infinite input gives NaN: infinity minus infinity.
struct Int4Above16 {
    static constexpr int CODES = 4;
    static constexpr float UNIT = 1, CENTER = -16, OFFSET = 24;

    static uint16_t value(uint16_t word, int i) { return uint16_t(0x4180 | (word >> 4 * i & 15) << 3); }
    template <int K> static Vec floats(IntVec words) {
#if defined(__AVX512F__)  // a table, since the units for masks multiply, too
        constexpr Vec TABLE = {16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
        return (Vec)_mm512_permutexvar_ps((__m512i)(words >> place<Int4Above16, K>), (__m512)TABLE);
#else
        constexpr int LEFT = 19 - place<Int4Above16, K>;
        return (Vec)(((LEFT < 0 ? words >> std::max(-LEFT, 0) : words << std::max(LEFT, 0)) & 0x780000) | 0x41800000);
#endif
    }
#if defined(__AVX512BW__)
    template <int I> static __m512i values(__m512i words) {
        constexpr int AND_OR = 0xea;  // a & b | c
        const auto moved = I ? _mm512_srli_epi16(words, std::max(4 * I - 3, 0)) : _mm512_slli_epi16(words, 3);
        return _mm512_ternarylogic_epi32(moved, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), AND_OR);
    }
#endif
};

struct Mxfp4 : FourBits<Mxfp4> {  // 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives
    static constexpr float CENTER = 0;
    static constexpr uint16_t VALUES[] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                          0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

    template <int K> static Vec floats(IntVec words) {
        constexpr int PLACE = place<Mxfp4, K>;
        const IntVec signs = words << (28 - PLACE) & INT32_MIN;
#if defined(__AVX2__)
        const auto table = _mm256_setr_ps(0, 0.5, 1, 1.5, 2, 3, 4, 6);
#if defined(__AVX512F__)
        const auto index = _mm512_and_si512((__m512i)(words >> PLACE), _mm512_set1_epi32(7));
        return (Vec)(signs | (IntVec)_mm512_permutexvar_ps(index, _mm512_castps256_ps512(table)));
#else
        return (Vec)(signs | (IntVec)_mm256_permutevar8x32_ps(table, (__m256i)(words >> PLACE)));
#endif
#else
        IntVec bits;
        for (int n = 0; n < LANES; n++) bits[n] = VALUES[words[n] >> PLACE & 7] << 16;
        return (Vec)(signs | bits);
#endif
    }
};

// The values are 2^24 times the codes, since a code is converted in the highest byte of an int32.
struct Int8 {
    static constexpr int CODES = 2;
    static constexpr int32_t SIGNS = int32_t(0x80808080), ZERO = 128;
    static constexpr float UNIT = 0x1p-24f, CENTER = 0, OFFSET = 0;

    static uint16_t value(uint16_t word, int i) { return high_half(float(int32_t(uint32_t(word >> 8 * i) << 24))); }
    template <int K> static Vec floats(IntVec words) {
        return __builtin_convertvector(words << (24 - place<Int8, K>) & int32_t(0xff000000), Vec);
    }
#if defined(__AVX512BW__)
    template <int I> static __m512i values(__m512i words) {
        const auto to_highest = [&](int32_t byte) {
            const auto in_lanes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
            return _mm512_shuffle_epi8(words, _mm512_or_si512(_mm512_set1_epi32(byte << 24 | 0x808080), in_lanes));
        };
        if (I == 0) return pair(_mm512_slli_epi32(words, 24), to_highest(2));
        return pair(to_highest(1), _mm512_and_si512(words, _mm512_set1_epi32(int32_t(0xff000000))));
    }

  private:
    // Returns two vectors of int32 as adjacent pairs of bfloat16.
    static __m512i pair(__m512i low, __m512i high) {
        const auto downwards = _mm512_set4_epi32(0x80800f0e, 0x80800b0a, 0x80800706, 0x80800302);
        const auto first = _mm512_castps_si512(_mm512_cvtepi32_ps(low));
        const auto second = _mm512_castps_si512(_mm512_cvtepi32_ps(high));
        return _mm512_mask_shuffle_epi8(second, 0x3333333333333333, first, downwards);
    }
#endif
};

// The values are 1/256 of the format's, so that the exponent's offset is in bits that no code has. All values except
// the eight smallest are the shifted code XOR that offset; SMALL has these eight values' replacement of the offset.
struct Fp8 {
    static constexpr int CODES = 2;
    static constexpr float UNIT = 0x1p8f, CENTER = 0, OFFSET = 0;
    static constexpr uint16_t SMALL[] = {0x0000, 0x3710, 0x37a0, 0x37f0, 0x3840, 0x3870, 0x3820, 0x3810};

    static uint16_t value(uint16_t word, int i) {
        const uint32_t code = word >> 8 * i, magnitude = code & 127, sign = (code & 128) << 8;
        if (magnitude < 8) return uint16_t(high_half(float(magnitude) / (1 << 17)) | sign);
        return uint16_t(((magnitude << 4) + (112 << 7)) | sign);
    }
    template <int K> static Vec floats(IntVec words) {
#if defined(__AVX512BW__)  // without denormal numbers, which may count as zero there
        const auto pairs = (IntVec)values<K / 2>((__m512i)words);
        return (Vec)(K % 2 ? pairs & int32_t(0xffff0000) : pairs << 16);
#else
        return (Vec)(words << (24 - place<Fp8, K>) >> 4 & int32_t(0x87f00000)) * 0x1p112f;
#endif
    }
#if defined(__AVX512BW__)
    template <int I> static __m512i values(__m512i words) {
        const auto exponent = _mm512_set1_epi16(112 << 7), small = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)SMALL));
        const auto codes = I ? _mm512_srli_epi16(words, 8) : words;
        const auto is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
        const auto differences = _mm512_mask_permutexvar_epi16(exponent, is_small, codes, small);
        const auto shifted = _mm512_srai_epi16(I ? words : _mm512_slli_epi16(words, 8), 4);
        constexpr int AND_XOR = 0x6a;  // a & b ^ c
        return _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi16(int16_t(0x87f0)), differences, AND_XOR);
    }
#elif defined(__AVX2__)
    template <int I> static __m256i values(__m256i words) {
        const auto small = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)SMALL));
        const auto high = I ? words : _mm256_slli_epi16(words, 8), codes = _mm256_srli_epi16(high, 8);
        const auto is_small = _mm256_cmpeq_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x78)), _mm256_setzero_si256());
        const auto bytes = _mm256_mullo_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(7)), _mm256_set1_epi16(0x202));
        const auto differences = _mm256_blendv_epi8(
            _mm256_set1_epi16(112 << 7), _mm256_shuffle_epi8(small, _mm256_or_si256(bytes, _mm256_set1_epi16(0x100))), is_small);
        return _mm256_xor_si256(_mm256_and_si256(_mm256_srai_epi16(high, 4), _mm256_set1_epi16(int16_t(0x87f0))), differences);
    }
#endif
};

template <class Work, int... I> void each_of(const Work& work, std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>{}), ...);
}

// Calls work(i) for each code of a word; i() is a constant.
template <class Codes, class Work> void each_code(const Work& work) {
    each_of(work, std::make_integer_sequence<int, Codes::CODES>{});
}

#if defined(__AVX512BW__)
// Returns the values of 32 words' I-th codes.
template <class Codes, int I> __m512i values(const uint16_t* words) {
    return Codes::template values<I>(_mm512_loadu_si512(words));
}
#elif defined(__AVX512BF16__)
template <class Codes, int I> __m512i values(const uint16_t* words) {
    uint16_t each[32];
    for (int n = 0; n < 32; n++) each[n] = Codes::value(words[n], I);
    return _mm512_loadu_si512(each);
}
#endif

// Expands WORDS words to CODES * WORDS bfloat16 values.
template <class Codes> void expand(const uint16_t* words, uint16_t* to) {
    each_code<Codes>([&](auto i) {
        uint16_t* part = to + i() * WORDS;
        int64_t j = 0;
#if defined(__AVX512BW__)
        for (; j < WORDS; j += 32) _mm512_store_si512(part + j, values<Codes, i()>(words + j));
#elif defined(__AVX2__)
        if constexpr (!std::is_same_v<Codes, Int8>)  // the compiler vectorizes Int8 equally well
            for (; j < WORDS; j += 16)
                _mm256_storeu_si256((__m256i*)(part + j), Codes::template values<i()>(_mm256_loadu_si256((const __m256i*)(words + j))));
#endif
        for (; j < WORDS; j++) part[j] = Codes::value(words[j], i());
    });
}

#if defined(__AVX512BF16__)
// Expands the weights of 16 outputs for 32 inputs: [16 pairs of inputs][16 outputs][2].
template <class Codes> [[gnu::always_inline]] inline void expand_tile(const uint16_t* words, uint16_t* to) {
    for (int pair = 0; pair < 16; pair += Codes::CODES, words += WORDS, to += Codes::CODES * LINE_VALUES) {
        __builtin_prefetch(words + AHEAD, 0, 2);
        each_code<Codes>([&](auto i) { _mm512_storeu_si512(to + i() * LINE_VALUES, values<Codes, i()>(words)); });
    }
}
#endif

}  // namespace
