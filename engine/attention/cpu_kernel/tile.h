// The inner loops: keys and values of one tile are copied out of their blocks into the order that the product
// kernel reads, then every block of query rows takes its step of the online softmax over the tile.
//
// Every row goes through the same operations in the same order whatever rows it shares a block with, so a
// row's result has the same bits alone, in a crowd, as a decode row and in a prefill chunk.
#pragma once

#include <algorithm>

#include "simd.h"

constexpr int TILE = 64;       // keys
constexpr int BLOCK_ROWS = 6;  // query rows whose accumulators fit the registers, with BLOCK_COLS vectors each
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int BLOCK_COLS = 2;
#else
constexpr int BLOCK_COLS = 4;
#endif

// How two factors and a sum in float32 are combined: a word is one float32, or two bfloat16 where the CPU
// multiplies pairs of them.
struct FloatMath {
    typedef float Word;
    static constexpr int PER_WORD = 1;
    static inline Vec multiply_add(Vec sum, const float* a, Vec b) { return sum + *a * b; }
    static inline Vec load_words(const float* from) { return load(from); }
    static inline void store_weights(float* to, Vec weights) { store(to, weights); }
};

#if defined(BF16_PAIRS)
struct PairMath {
    typedef uint32_t Word;
    static constexpr int PER_WORD = 2;
    static inline Vec multiply_add(Vec sum, const uint32_t* a, __m512i b) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*a), (__m512bh)b);
    }
    static inline __m512i load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
    static inline void store_weights(uint32_t* to, Vec weights) {
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)weights));
    }
};
#endif

// sums[R][C vectors] = scale[R] * sums + a[R][depth] * b[depth][C vectors]; a null scale stands for zeros.
template <class Math, int R, int C>
static __attribute__((noinline)) void product(const typename Math::Word* a, int64_t a_stride,
                                              const typename Math::Word* b, int64_t b_stride, int depth,
                                              const float* scale, float* sums, int64_t sums_stride) {
    Vec acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = scale ? load(sums + r * sums_stride + c * LANES) * scale[r] : Vec{};
    for (int d = 0; d < depth; d++) {
        decltype(Math::load_words(b)) words[C];
        for (int c = 0; c < C; c++) words[c] = Math::load_words(b + d * b_stride + c * LANES);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                acc[r][c] = Math::multiply_add(acc[r][c], a + r * a_stride + d, words[c]);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * sums_stride + c * LANES, acc[r][c]);
}

template <class Math, int R>
static void product_rows(const typename Math::Word* a, int64_t a_stride, const typename Math::Word* b,
                         int64_t b_stride, int depth, const float* scale, float* sums, int64_t sums_stride,
                         int vectors) {
    int c = 0;
    for (; c + BLOCK_COLS <= vectors; c += BLOCK_COLS)
        product<Math, R, BLOCK_COLS>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES,
                                     sums_stride);
    for (; c + 2 <= vectors; c += 2)
        product<Math, R, 2>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES, sums_stride);
    for (; c < vectors; c++)
        product<Math, R, 1>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES, sums_stride);
}

template <class Math, class... Args>
static inline void product_of(int rows, Args... args) {
    switch (rows) {
        case 1: return product_rows<Math, 1>(args...);
        case 2: return product_rows<Math, 2>(args...);
        case 3: return product_rows<Math, 3>(args...);
        case 4: return product_rows<Math, 4>(args...);
        case 5: return product_rows<Math, 5>(args...);
        default: return product_rows<Math, BLOCK_ROWS>(args...);
    }
}

// A row of elements as words of the arithmetic: in place where they are the same bits, else in the buffer.
static inline const float* as_words(const float* row, int, float*) { return row; }
static inline const uint32_t* as_words(const uint16_t* row, int, uint32_t*) { return (const uint32_t*)row; }
static inline const float* as_words(const uint16_t* row, int head_dim, float* buffer) {
    for (int d = 0; d < head_dim; d++) buffer[d] = bf16_to_float(row[d]);
    return buffer;
}

// to[word][TILE] = from[16 keys][word]
template <class Word>
static inline void transpose_16(const Word* const* from, int words, Word* to) {
    int w = 0;
#if defined(__AVX512F__)
    for (; w + 4 <= words; w += 4) {
        __m512i v[4];  // v[i] holds four words of keys i, i + 4, i + 8 and i + 12
        for (int i = 0; i < 4; i++) {
            v[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(from[i] + w)));
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 4] + w)), 1);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 8] + w)), 2);
            v[i] = _mm512_inserti32x4(v[i], _mm_loadu_si128((const __m128i*)(from[i + 12] + w)), 3);
        }
        __m512i low01 = _mm512_unpacklo_epi32(v[0], v[1]), high01 = _mm512_unpackhi_epi32(v[0], v[1]);
        __m512i low23 = _mm512_unpacklo_epi32(v[2], v[3]), high23 = _mm512_unpackhi_epi32(v[2], v[3]);
        _mm512_storeu_si512(to + (w + 0) * TILE, _mm512_unpacklo_epi64(low01, low23));
        _mm512_storeu_si512(to + (w + 1) * TILE, _mm512_unpackhi_epi64(low01, low23));
        _mm512_storeu_si512(to + (w + 2) * TILE, _mm512_unpacklo_epi64(high01, high23));
        _mm512_storeu_si512(to + (w + 3) * TILE, _mm512_unpackhi_epi64(high01, high23));
    }
#endif
    for (; w < words; w++)
        for (int k = 0; k < 16; k++) to[w * TILE + k] = from[k][w];
}

// packed[word][TILE]: one column a key. Columns up to a multiple of 16 are filled (with the last key).
template <class Math, class Element>
static void pack_keys(const Element* const* rows, int keys, int head_dim, typename Math::Word* buffer,
                      typename Math::Word* packed) {
    for (int first = 0; first < keys; first += 16) {
        const typename Math::Word* group[16];
        for (int k = 0; k < 16; k++)
            group[k] = as_words(rows[first + k < keys ? first + k : keys - 1], head_dim, buffer + k * head_dim);
        transpose_16(group, head_dim / Math::PER_WORD, packed + first);
    }
}

// packed[key][width]: the rows one after another, zeros from head_dim to width.
template <class Element>
static void pack_values(const Element* const* rows, int keys, int head_dim, int width, float* packed) {
    for (int k = 0; k < keys; k++, packed += width) {
        const float* row = as_words(rows[k], head_dim, packed);
        if (row != packed) memcpy(packed, row, head_dim * sizeof(float));
        memset(packed + head_dim, 0, (width - head_dim) * sizeof(float));
    }
}

#if defined(BF16_PAIRS)
// packed[pair of keys][width]: each word holds one dimension of two keys; an odd last key is paired with zeros.
static void pack_values(const uint16_t* const* rows, int keys, int head_dim, int width, uint32_t* packed) {
    alignas(64) uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = i, order[2 * i + 1] = 32 + i;
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int k = 0; k < keys; k += 2, packed += width) {
        for (int d = 0; d < head_dim; d += 32) {
            __mmask32 mask = head_dim - d >= 32 ? ~0u : (1u << (head_dim - d)) - 1;
            __m512i even = _mm512_maskz_loadu_epi16(mask, rows[k] + d);
            __m512i odd = k + 1 < keys ? _mm512_maskz_loadu_epi16(mask, rows[k + 1] + d) : __m512i{};
            _mm512_storeu_si512(packed + d, _mm512_permutex2var_epi16(even, low, odd));
            if (d + 16 < width) _mm512_storeu_si512(packed + d + 16, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}
#endif

// How raw scores become base-2 logarithms of weights.
struct ScoreScale {
    float scale;   // applied to q.k, in units of log2
    float inner;   // soft cap: 2 log2(e) scale / cap, or 0 for none
    float capped;  // soft cap: log2(e) cap

    ScoreScale(float qk_scale, float softcap) {
        const float log2_e = 1.4426950408889634f;
        inner = softcap > 0 ? 2 * log2_e * qk_scale / softcap : 0;
        capped = log2_e * softcap;
        scale = softcap > 0 ? 1 : qk_scale * log2_e;
    }

    Vec cap(Vec score) const {  // cap * tanh(score * scale / cap)
        Vec x = max(-max(-(score * inner), splat(-40.0f)), splat(-40.0f));
        return capped * (1.0f - 2.0f / (exp2(x) + 1.0f));
    }
};

// One row's step of the online softmax over the scores of keys [low, high) of a tile. Writes the weights,
// zeros elsewhere; updates the maximum and the sum (a vector of partial sums); returns what to scale the
// row's output by.
template <class Math>
static inline float softmax_step(float* scores, int vectors, int low, int high, const ScoreScale& how,
                                 float& maximum, float* sums, typename Math::Word* weights) {
    if (how.inner > 0)
        for (int v = 0; v < vectors; v++) store(scores + v * LANES, how.cap(load(scores + v * LANES)));
    if (low > 0 || high < vectors * LANES)
        for (int v = 0; v < vectors; v++) {
            IntVec key = lane_indices() + v * LANES;
            Vec score = load(scores + v * LANES);
            store(scores + v * LANES, (key >= low) & (key < high) ? score : splat(MINUS_INFINITY));
        }
    Vec largest = load(scores);
    for (int v = 1; v < vectors; v++) largest = max(largest, load(scores + v * LANES));
    const float before = maximum;
    const float tile_maximum = largest_lane(largest) * how.scale;
    if (tile_maximum > before) maximum = tile_maximum;
    if (maximum == MINUS_INFINITY) {
        for (int v = 0; v < vectors; v++) Math::store_weights(weights + v * LANES / Math::PER_WORD, Vec{});
        return 1;
    }
    Vec total{};
    for (int v = 0; v < vectors; v++) {
        Vec weight = exp2(load(scores + v * LANES) * how.scale - maximum);
        total = total + weight;
        Math::store_weights(weights + v * LANES / Math::PER_WORD, weight);
    }
    const float rescale = maximum == before ? 1 : exp2(splat(before - maximum))[0];
    store(sums, load(sums) * rescale + total);
    return rescale;
}

// Running results of some query rows, one after another with this stride: output [width], partial sums of
// weights [LANES], maximum [LANES, the first used].
struct RowState {
    float* data;
    int width;

    int stride() const { return width + 2 * LANES; }
    float* output(int row) const { return data + int64_t(row) * stride(); }
    float* sums(int row) const { return output(row) + width; }
    float& maximum(int row) const { return output(row)[width + LANES]; }

    void clear(int rows) const {
        memset(data, 0, int64_t(rows) * stride() * sizeof(float));
        for (int r = 0; r < rows; r++) maximum(r) = MINUS_INFINITY;
    }
};

// Adds a later split's results to those of the splits before it.
static __attribute__((noinline)) void fold(const RowState& into, const RowState& from, int rows) {
    for (int r = 0; r < rows; r++) {
        const float largest = std::max(into.maximum(r), from.maximum(r));
        if (largest == MINUS_INFINITY) continue;
        const Vec a = exp2(splat(into.maximum(r) - largest)), b = exp2(splat(from.maximum(r) - largest));
        float *to = into.output(r), *add = from.output(r);
        for (int i = 0; i < into.width + LANES; i += LANES)
            store(to + i, load(to + i) * a + load(add + i) * b);
        into.maximum(r) = largest;
    }
}
