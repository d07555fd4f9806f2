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
    static constexpr bool COARSE = false;
    static inline Vec multiply_add(Vec sum, const float* a, Vec b) { return sum + *a * b; }
    static inline Vec load_words(const float* from) { return load(from); }
    static inline void store_weights(float* to, Vec weights) { store(to, weights); }
};

#if defined(BF16_PAIRS)
struct PairMath {
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

// sums[R][C vectors] = scale[R] * sums + a[R][depth] * b[depth][C vectors], or without the first term.
template <class Math, bool ADD, int R, int C>
static __attribute__((noinline)) void product(const typename Math::Word* a, int64_t a_stride,
                                              const typename Math::Word* b, int64_t b_stride, int depth,
                                              const float* scale, float* sums, int64_t sums_stride) {
    Vec acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            acc[r][c] = ADD ? load(sums + r * sums_stride + c * LANES) * scale[r] : Vec{};
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

template <class Math, bool ADD, int R>
static void product_rows(const typename Math::Word* a, int64_t a_stride, const typename Math::Word* b,
                         int64_t b_stride, int depth, const float* scale, float* sums, int64_t sums_stride,
                         int vectors) {
    int c = 0;
    for (; c + BLOCK_COLS <= vectors; c += BLOCK_COLS)
        product<Math, ADD, R, BLOCK_COLS>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES,
                                          sums_stride);
    for (; c + 2 <= vectors; c += 2)
        product<Math, ADD, R, 2>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES,
                                 sums_stride);
    for (; c < vectors; c++)
        product<Math, ADD, R, 1>(a, a_stride, b + c * LANES, b_stride, depth, scale, sums + c * LANES,
                                 sums_stride);
}

template <class Math, bool ADD, class... Args>
static inline void product_of(int rows, Args... args) {
    switch (rows) {
        case 1: return product_rows<Math, ADD, 1>(args...);
        case 2: return product_rows<Math, ADD, 2>(args...);
        case 3: return product_rows<Math, ADD, 3>(args...);
        case 4: return product_rows<Math, ADD, 4>(args...);
        case 5: return product_rows<Math, ADD, 5>(args...);
        default: return product_rows<Math, ADD, BLOCK_ROWS>(args...);
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

// Where a tile's keys lie, for the first head of a task; the value of a key lies `to_value` elements behind it.
template <class Element> struct TileRows {
    const Element* keys[TILE];
    int64_t to_value;
    int count = 0;
};

// Fetches the tile after this one, all heads of the task, in the order of memory and a few rows at a time: in
// between the work on this tile, so that the memory never waits for the arithmetic nor the other way round.
template <class Element> struct Sweep {
    const TileRows<Element>& rows;
    int elements, done = 0;

    // Inlined by force: g++ takes a call that only prefetches for one without effect, and drops it.
    __attribute__((always_inline)) void fetch(int count) {
        for (; count > 0 && done < 2 * rows.count; count--, done++) {
            const Element* row = done < rows.count ? rows.keys[done] : rows.keys[done - rows.count] + rows.to_value;
            for (int e = 0; e < elements; e += 64 / int(sizeof(Element))) __builtin_prefetch(row + e, 0, 2);
        }
    }
};

// packed[word][TILE]: one column a key. Columns up to a multiple of 16 are filled (with the last key).
template <class Math, class Element>
static void pack_keys(const TileRows<Element>& rows, int64_t offset, int head_dim, typename Math::Word* buffer,
                      typename Math::Word* packed, Sweep<Element>& sweep, int quota) {
    for (int first = 0; first < rows.count; first += 16) {
        const typename Math::Word* group[16];
        for (int k = 0; k < 16; k++) {
            const Element* row = rows.keys[std::min(first + k, rows.count - 1)] + offset;
            group[k] = as_words(row, head_dim, buffer + k * head_dim);
        }
        sweep.fetch(quota);
        transpose_16(group, head_dim / Math::PER_WORD, packed + first);
    }
}

// packed[key][width]: the rows one after another, zeros from head_dim to width.
template <class Element>
static void pack_values(const TileRows<Element>& rows, int64_t offset, int head_dim, int width, float* packed, Sweep<Element>& sweep, int quota) {
    offset += rows.to_value;
    for (int k = 0; k < rows.count; k++, packed += width) {
        if (k % 16 == 0) sweep.fetch(quota);
        const float* row = as_words(rows.keys[k] + offset, head_dim, packed);
        if (row != packed) memcpy(packed, row, head_dim * sizeof(float));
        memset(packed + head_dim, 0, (width - head_dim) * sizeof(float));
    }
}

#if defined(BF16_PAIRS)
// packed[pair of keys][width]: each word holds one dimension of two keys; an odd last key is paired with zeros.
static void pack_values(const TileRows<uint16_t>& rows, int64_t offset, int head_dim, int width, uint32_t* packed, Sweep<uint16_t>& sweep, int quota) {
    offset += rows.to_value;
    alignas(64) uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = i, order[2 * i + 1] = 32 + i;
    const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (int k = 0; k < rows.count; k += 2, packed += width) {
        if (k % 16 == 0) sweep.fetch(quota);
        const uint16_t* row = rows.keys[k] + offset;
        const uint16_t* row_after = k + 1 < rows.count ? rows.keys[k + 1] + offset : nullptr;
        for (int d = 0; d < head_dim; d += 32) {
            __mmask32 mask = head_dim - d >= 32 ? ~0u : (1u << (head_dim - d)) - 1;
            __m512i even = _mm512_maskz_loadu_epi16(mask, row + d);
            __m512i odd = row_after ? _mm512_maskz_loadu_epi16(mask, row_after + d) : __m512i{};
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

// The step of the online softmax of a block of rows over the scores of a tile's first GROUPS * 16 keys, of which
// row r sees those in [low[r], high[r]). Writes their weights, zeros elsewhere; updates the rows' maxima and
// sums; tells what to scale the rows' outputs by.
template <class Math, int GROUPS>
static void softmax_block(int rows, const float* scores, const int* low, const int* high, const ScoreScale& how,
                          const RowState& state, int first_row, typename Math::Word* weights, float* rescale) {
    constexpr int VECTORS = GROUPS * 16 / LANES;
    alignas(64) float drop[LANES * ((BLOCK_ROWS + LANES - 1) / LANES)] = {};
    Vec totals[BLOCK_ROWS];
    for (int r = 0; r < rows; r++) {
        Vec score[VECTORS];
        for (int v = 0; v < VECTORS; v++) score[v] = load(scores + r * TILE + v * LANES);
        if (how.inner > 0)
            for (int v = 0; v < VECTORS; v++) score[v] = how.cap(score[v]);
        if (low[r] > 0 || high[r] < GROUPS * 16)
            for (int v = 0; v < VECTORS; v++) {
                const IntVec key = lane_indices() + v * LANES;
                score[v] = (key >= low[r]) & (key < high[r]) ? score[v] : splat(MINUS_INFINITY);
            }
        Vec largest = score[0];
        for (int v = 1; v < VECTORS; v++) largest = max(largest, score[v]);
        const float before = state.maximum(first_row + r);
        const float maximum = std::max(before, largest_lane(largest) * how.scale);
        state.maximum(first_row + r) = maximum;
        // A row that has seen no key yet: any finite number makes all its weights 0.
        const float subtract = maximum == MINUS_INFINITY ? 0 : maximum;
        drop[r] = before - subtract;
        totals[r] = Vec{};
        for (int v = 0; v < VECTORS; v++) {
            const Vec weight = exp2<Math::COARSE>(score[v] * how.scale - subtract);
            totals[r] = totals[r] + weight;
            Math::store_weights(weights + r * TILE + v * LANES / Math::PER_WORD, weight);
        }
    }
    for (int i = 0; i < BLOCK_ROWS; i += LANES) store(drop + i, exp2(load(drop + i)));
    for (int r = 0; r < rows; r++) {
        rescale[r] = drop[r];
        float* sums = state.sums(first_row + r);
        store(sums, load(sums) * rescale[r] + totals[r]);
    }
}

template <class Math, class... Args>
static inline void softmax_of(int groups, Args... args) {
    switch (groups) {
        case 1: return softmax_block<Math, 1>(args...);
        case 2: return softmax_block<Math, 2>(args...);
        case 3: return softmax_block<Math, 3>(args...);
        default: return softmax_block<Math, 4>(args...);
    }
}

// The row's output divided by the sum of its weights.
static inline void write_output(const float* output, float inverse_sum, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d++) to[d] = output[d] * inverse_sum;
}
static inline void write_output(const float* output, float inverse_sum, int head_dim, uint16_t* to) {
    for (int d = 0; d < head_dim; d++) to[d] = float_to_bf16(output[d] * inverse_sum);
}

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
