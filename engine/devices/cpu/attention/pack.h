// Copies a tile's keys and values from their blocks to the order that the product kernel reads.
#pragma once

#include <algorithm>

#include "codes.h"
#include "product.h"

// Returns a row in the type of the arithmetic: the row itself if it has this type, else a copy in the buffer.
static inline const float* as_words(const float* row, int, float*) { return row; }
static inline const uint32_t* as_words(const uint16_t* row, int, uint32_t*) { return (const uint32_t*)row; }
static inline const float* as_words(const uint16_t* row, int head_dim, float* buffer) {
    for (int d = 0; d < head_dim; d++) buffer[d] = bf16_to_float(row[d]);
    return buffer;
}

#if defined(__AVX512BW__)
// Converts 32 FP8 codes to bfloat16, exactly: the exponent's bias is 127 instead of 7, and the eight subnormal codes
// come from a table.
static inline __m512i bf16_of(__m256i fp8) {
    alignas(64) static const uint16_t subnormal[32] = {0,      0x3b00, 0x3b80, 0x3bc0,  // multiples of 1/512
                                                       0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i codes = _mm512_cvtepu8_epi16(fp8), magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __m512i values =
        _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude, _mm512_load_si512(subnormal));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(values, sign);
}

template <class Put> static inline void each_32_codes(const Fp8* row, int head_dim, const Put& put) {
    for (int d = 0; d < head_dim; d += 32) {
        const __mmask32 inside = head_dim - d < 32 ? (1u << (head_dim - d)) - 1 : ~0u;
        put(d, inside, bf16_of(_mm256_maskz_loadu_epi8(inside, row + d)));
    }
}

static inline const uint32_t* as_words(const Fp8* row, int head_dim, uint32_t* buffer) {
    each_32_codes(row, head_dim, [&](int d, __mmask32 inside, __m512i values) {
        _mm512_mask_storeu_epi16((uint16_t*)buffer + d, inside, values);
    });
    return buffer;
}

static inline const float* as_words(const Fp8* row, int head_dim, float* buffer) {
    each_32_codes(row, head_dim, [&](int d, __mmask32 inside, __m512i values) {
        const auto put = [&](float* to, __mmask16 mask, __m256i half) {
            _mm512_mask_storeu_epi32(to, mask, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        };
        put(buffer + d, __mmask16(inside), _mm512_castsi512_si256(values));
        put(buffer + d + 16, __mmask16(inside >> 16), _mm512_extracti64x4_epi64(values, 1));
    });
    return buffer;
}
#else
static inline const float* as_words(const Fp8* row, int head_dim, float* buffer) {
    for (int d = 0; d < head_dim; d++) buffer[d] = from_code(row[d]);
    return buffer;
}
#endif

constexpr float WHOLE_LIMIT = 32639;  // the largest int16 that is 256 * x + y of signed bytes x and y

// Rounds to int16 in units of the row's largest magnitude / WHOLE_LIMIT. Returns the unit.
static inline float to_whole(const float* row, int count, int16_t* to) {
    uint32_t most = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t magnitude = bits_of(row[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float top = float_of(most);
    const bool finite = most < 0x7f800000, is_zero = top < SMALLEST;
    const float inverse = is_zero || !finite ? 0 : WHOLE_LIMIT / top;
    for (int i = 0; i < count; i++) to[i] = int16_t(int32_t(__builtin_rintf(finite ? row[i] * inverse : 0)));
    return !finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0 : top / WHOLE_LIMIT;
}

// Copies a query row to the product kernel's input, in the order of the packed keys' words. Returns its unit.
template <class Query, class Word>
static inline float load_query(const Query* row, int head_dim, Word* buffer, Word* to, int words) {
    memcpy(to, as_words(row, head_dim, buffer), words * sizeof(Word));
    return 1;
}
// Converts it to int16 in units of the row; the buffer gets the int16 values in their own order.
template <class Query>
static inline float load_query(const Query* row, int head_dim, int32_t* buffer, int32_t* to, int) {
    float values[MAX_CODES];
    for (int d = 0; d < head_dim; d++) values[d] = to_float(row[d]);
    auto *numbers = (int16_t*)buffer, *ordered = (int16_t*)to;
    const float unit = to_whole(values, head_dim, numbers);
    for (int d = 0; d < head_dim; d += 4)
        for (int i = 0; i < 4; i++) ordered[d + i] = numbers[d + i / 2 + i % 2 * 2];
    return unit;
}

#if defined(__AVX512F__)
#define TRANSPOSES 1
// columns[4] = words w to w + 3 of the rows of 16 keys
template <class Word> static inline void four_columns(const Word* const* from, int w, IntVec* columns) {
    __m512i v[4];  // v[i] holds four words of keys i, i + 4, i + 8 and i + 12
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(from[i] + w)));
        v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 4] + w)), 1);
        v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 8] + w)), 2);
        v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 12] + w)), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
    columns[0] = (IntVec)_mm512_unpacklo_epi64(low01, low23);
    columns[1] = (IntVec)_mm512_unpackhi_epi64(low01, low23);
    columns[2] = (IntVec)_mm512_unpacklo_epi64(high01, high23);
    columns[3] = (IntVec)_mm512_unpackhi_epi64(high01, high23);
}
#elif defined(__AVX2__)
#define TRANSPOSES 1
// The same for 8 keys.
template <class Word> static inline void four_columns(const Word* const* from, int w, IntVec* columns) {
    __m256i v[4];  // v[i] holds four words of keys i and i + 4
    for (int i = 0; i < 4; i++)
        v[i] = _mm256_loadu2_m128i((const __m128i*)(from[i + 4] + w), (const __m128i*)(from[i] + w));
    const __m256i low01 = _mm256_unpacklo_epi32(v[0], v[1]), high01 = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(v[2], v[3]), high23 = _mm256_unpackhi_epi32(v[2], v[3]);
    columns[0] = (IntVec)_mm256_unpacklo_epi64(low01, low23);
    columns[1] = (IntVec)_mm256_unpackhi_epi64(low01, low23);
    columns[2] = (IntVec)_mm256_unpacklo_epi64(high01, high23);
    columns[3] = (IntVec)_mm256_unpackhi_epi64(high01, high23);
}
#endif

#if defined(TRANSPOSES)
// Calls put(w, first key, column) for words below `end`, with a vector of keys each. Returns the number of words done.
template <class Word, class Put> static inline int each_column(const Word* const* from, int end, const Put& put) {
    asm volatile("" : : "r"(from) : "memory");  // keeps g++ from holding the 16 pointers in vector registers
    int w = 0;
    for (; w + 4 <= end; w += 4)
        for (int key = 0; key < 16; key += LANES) {
            IntVec columns[4];
            four_columns(from + key, w, columns);
            for (int i = 0; i < 4; i++) put(w + i, key, columns[i]);
        }
    return w;
}
#endif

#if defined(TRANSPOSES)
// to[word][to_stride] = from[up to 16 rows, of `stride` words][word], for some words, a multiple of 4. Further columns
// repeat the last row.
template <class Word>
static inline void transpose_rows(const Word* from, int64_t stride, int rows, int words, Word* to, int64_t to_stride) {
    const Word* row[16];
    for (int r = 0; r < 16; r++) row[r] = from + std::min(r, rows - 1) * stride;
    each_column(row, words, [&](int word, int first, IntVec column) {
        store((int32_t*)to + word * to_stride + first, column);
    });
}
#endif

// to[word][TILE] = from[16 keys][word]
template <class Word>
static inline void transpose_16(const Word* const* from, int words, Word* to) {
    int w = 0;
#if defined(TRANSPOSES)
    w = each_column(from, words, [&](int word, int key, IntVec column) { store((int32_t*)to + word * TILE + key, column); });
#endif
    for (; w < words; w++)
        for (int k = 0; k < 16; k++) to[w * TILE + k] = from[k][w];
}

#if defined(TRANSPOSES)
// The same for bfloat16: two values become two words.
static inline void transpose_pairs(const uint32_t* const* from, int pairs, float* to) {
    const auto put = [&](int pair, int key, IntVec both) {
        float* even = to + 2 * pair * TILE + key;
        store(even, (Vec)(both << 16));
        store(even + TILE, (Vec)(both & int32_t(0xffff0000)));
    };
    for (int pair = each_column(from, pairs, put); pair < pairs; pair++)
        for (int k = 0; k < 16; k++) {
            to[2 * pair * TILE + k] = float_of(from[k][pair] << 16);
            to[(2 * pair + 1) * TILE + k] = float_of(from[k][pair] & 0xffff0000);
        }
}
#endif

// Turns a vector of keys' four codes each into int16 words of two codes: first the even codes, then the odd ones.
static inline void put_codes(IntVec four, int32_t* to) {
    store(to, (IntVec)((ShortVec)four << 8 >> 8));
    store(to + TILE, (IntVec)((ShortVec)four >> 8));
}

// to[word][TILE] = codes of from[16 keys][four codes]; the buffer has room for the unconverted codes.
static inline void transpose_codes(const int32_t* const* from, int fours, int32_t* buffer, int32_t* to) {
    int w = 0;
#if defined(TRANSPOSES)
    w = each_column(from, fours, [&](int word, int key, IntVec column) { put_codes(column, to + 2 * word * TILE + key); });
#endif
    for (; w < fours; w++) {
        for (int k = 0; k < 16; k++) buffer[k] = from[k][w];
        for (int k = 0; k < 16; k += LANES) put_codes(load(buffer + k), to + 2 * w * TILE + k);
    }
}

// Pointers to a tile's keys and values of a task's first head. Up to a multiple of 16, the last pointer is repeated.
template <class Element> struct TileRows {
    const Element *keys[TILE], *values[TILE];
    int count = 0;
};

// Prefetches the next tile, for all heads of the task, in memory order: a few rows at a time, between parts of the work
// on the current tile, so that loads and arithmetic overlap.
template <class Element> struct Sweep {
    const TileRows<Element>& rows;
    int key_elements, value_elements;  // elements of a row, all heads
    int quota;                         // rows to fetch at a time
    int64_t key_scales, value_scales;  // bytes from a row to its scales
    int done = 0;

    // always_inline: g++ drops calls to a function that only prefetches, because it sees no effect.
    __attribute__((always_inline)) void fetch() {
        constexpr uintptr_t LINE = 64;
        for (int last = std::min(done + quota, 2 * rows.count); done < last; done++) {
            const bool value = done >= rows.count;
            const Element* row = value ? rows.values[done - rows.count] : rows.keys[done];
            const uintptr_t end = uintptr_t(row + (value ? value_elements : key_elements));
            uintptr_t line = uintptr_t(row) / LINE * LINE;
            for (; line < end; line += LINE) __builtin_prefetch((const void*)line, 0, 2);
            const uintptr_t scales = uintptr_t(row) + (value ? value_scales : key_scales);
            if (is_coded<Element> && scales >= line) __builtin_prefetch((const void*)scales, 0, 2);
        }
    }
};

// Calls turn(keys, first) for 16 keys at a time, reading the stored keys as `Word`s.
template <class Word, class Element, class Turn>
static inline void each_16_keys(const TileRows<Element>& rows, int64_t offset, Sweep<Element>& sweep, const Turn& turn) {
    for (int first = 0; first < rows.count; first += 16) {
        const Word* group[16];
        for (int k = 0; k < 16; k++) group[k] = (const Word*)(rows.keys[first + k] + offset);
        sweep.fetch();
        turn(group, first);
    }
}

// packed[word][TILE]: one column for each key, up to a multiple of 16 columns. Extra columns repeat the last key.
template <class Word, class Element>
static void pack_keys(const TileRows<Element>& rows, int64_t offset, int head_dim, int words, Sweep<Element>& sweep,
                      Word* buffer, Word* packed) {
    for (int first = 0; first < rows.count; first += 16) {
        const Word* group[16];
        for (int k = 0; k < 16; k++) {
            const Element* row = rows.keys[first + k] + offset;
            group[k] = as_words(row, head_dim, buffer + k * head_dim);
        }
        sweep.fetch();
        transpose_16(group, words, packed + first);
    }
}

#if defined(TRANSPOSES)
// The same for bfloat16 keys of an even size that are multiplied as float32.
static void pack_keys(const TileRows<uint16_t>& rows, int64_t offset, int head_dim, int words, Sweep<uint16_t>& sweep,
                      float* buffer, float* packed) {
    if (head_dim % 2) return pack_keys<float, uint16_t>(rows, offset, head_dim, words, sweep, buffer, packed);
    each_16_keys<uint32_t>(rows, offset, sweep, [&](auto keys, int first) { transpose_pairs(keys, head_dim / 2, packed + first); });
}
#endif

#if defined(__AVX512BW__)
// The same for FP8 codes, converted to bfloat16 first.
static void pack_keys(const TileRows<Fp8>& rows, int64_t offset, int head_dim, int words, Sweep<Fp8>& sweep, float* buffer,
                      float* packed) {
    if (head_dim % 2) return pack_keys<float, Fp8>(rows, offset, head_dim, words, sweep, buffer, packed);
    each_16_keys<Fp8>(rows, offset, sweep, [&](auto keys, int first) {
        const uint32_t* pairs[16];
        for (int k = 0; k < 16; k++) pairs[k] = as_words(keys[k], head_dim, (uint32_t*)buffer + k * head_dim / 2);
        transpose_pairs(pairs, head_dim / 2, packed + first);
    });
}
#endif

// The same for int8 codes, two in a word.
static void pack_keys(const TileRows<Int8>& rows, int64_t offset, int head_dim, int, Sweep<Int8>& sweep,
                      int32_t* buffer, int32_t* packed) {
    each_16_keys<int32_t>(rows, offset, sweep, [&](auto keys, int first) { transpose_codes(keys, head_dim / 4, buffer, packed + first); });
}

// scales[head][TILE], read `distance` bytes after each row, up to a multiple of 16 rows. It reads all heads of a task
// at once, since a token's scales share a cache line.
template <class Element>
static void take_scales(const Element* const* rows, int count, int64_t distance, int heads, float* scales) {
    for (int first = 0; first < count; first += 16) {
        const float* group[16];
        for (int k = 0; k < 16; k++) group[k] = (const float*)((const char*)rows[first + k] + distance);
        transpose_16(group, heads, scales + first);
    }
}

// packed[key][width]: one row for each key, with zeros from head_dim to width.
template <class Element>
static void pack_values(const TileRows<Element>& rows, int64_t offset, int head_dim, Sweep<Element>& sweep,
                        int width, float*, float* packed) {
    for (int k = 0; k < rows.count; k++, packed += width) {
        if (k % 16 == 0) sweep.fetch();
        const float* row = as_words(rows.values[k] + offset, head_dim, packed);
        if (row != packed) memcpy(packed, row, head_dim * sizeof(float));
        memset(packed + head_dim, 0, (width - head_dim) * sizeof(float));
    }
}

#if defined(__AVX512BW__)
// Loads 32 numbers of 16 bits: bfloat16 values, or codes as int16.
static inline __m512i halves_of(const uint16_t* from) { return _mm512_loadu_si512(from); }
static inline __m512i halves_of(const Int8* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}
#if defined(BF16_PAIRS)
static inline __m512i halves_of(const Fp8* from) { return bf16_of(_mm256_loadu_si256((const __m256i*)from)); }
#endif

// packed[pair of keys][width]: a word holds one dimension of two keys; an odd last key is paired with zeros.
template <class Word, class Element>
static void pack_values(const TileRows<Element>& rows, int64_t offset, int head_dim, Sweep<Element>& sweep, int width,
                        Word*, Word* packed) {
    alignas(64) uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = i, order[2 * i + 1] = 32 + i;
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int k = 0; k < rows.count; k += 2, packed += width) {
        if (k % 16 == 0) sweep.fetch();
        const bool paired = k + 1 < rows.count;
        const Element *row = rows.values[k] + offset, *row_after = rows.values[paired ? k + 1 : k] + offset;
        const __m512i keep = paired ? _mm512_set1_epi16(-1) : _mm512_setzero_si512();
        int d = 0;
        auto put = [&](const Element* first, const Element* second) {
            const __m512i even = halves_of(first), odd = _mm512_and_si512(halves_of(second), keep);
            _mm512_storeu_si512(packed + d, _mm512_permutex2var_epi16(even, low, odd));
            if (d + 16 < width) _mm512_storeu_si512(packed + d + 16, _mm512_permutex2var_epi16(even, high, odd));
        };
        for (; d + 32 <= head_dim; d += 32) put(row + d, row_after + d);
        if (d == head_dim) continue;
        Element ends[2][32] = {};
        memcpy(ends[0], row + d, (head_dim - d) * sizeof(Element));
        memcpy(ends[1], row_after + d, (head_dim - d) * sizeof(Element));
        put(ends[0], ends[1]);
    }
}
#else
// packed[pair of keys][width]: a word holds one dimension of two keys as int16; an odd last key is paired with zeros.
static void pack_values(const TileRows<Int8>& rows, int64_t offset, int head_dim, Sweep<Int8>& sweep, int width,
                        int32_t*, int32_t* packed) {
    for (int k = 0; k < rows.count; k += 2, packed += width) {
        if (k % 16 == 0) sweep.fetch();
        static const int8_t zeros[MAX_CODES] = {};
        const int8_t* row = &rows.values[k][offset].code;
        const int8_t* row_after = k + 1 < rows.count ? &rows.values[k + 1][offset].code : zeros;
        int d = 0;
#pragma GCC unroll 4
        for (; d + LANES <= head_dim; d += LANES)
            store(packed + d, (widen(row + d) & 0xffff) | widen(row_after + d) << 16);
        for (; d < head_dim; d++) packed[d] = (row[d] & 0xffff) | int32_t(row_after[d]) * 65536;
        for (; d < width; d++) packed[d] = 0;
    }
}
#endif
