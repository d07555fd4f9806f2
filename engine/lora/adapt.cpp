// out[row][first + n] += sum over r of up[r][n] * (sum over k of down[r][k] * x[row][k]): bfloat16 in and out, float32
// sums. A product of rank 16 would fill a quarter of a panel of the linear layers' kernel, so this has one of its own.
// A row's sums are in the same order in every batch: its result has the same bits.

#include "adapt.h"

#include <algorithm>
#include <vector>

#include "../attention/cpu_kernel/simd.h"

namespace {

constexpr int64_t MOST_ROWS = 4;  // that share the weights which are read
constexpr int RANKS = 4;          // that are summed side by side
constexpr int VECTORS = 4;        // of outputs, likewise
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;  // below so many multiplications, threads don't pay

#if defined(BF16_PAIRS)
constexpr int64_t STEP = 2 * LANES;

inline Vec add_products(Vec sums, const uint16_t* a, const uint16_t* b) {
    __m512bh x, y;
    memcpy(&x, a, sizeof x), memcpy(&y, b, sizeof y);
    return (Vec)_mm512_dpbf16_ps((__m512)sums, x, y);
}
#else
constexpr int64_t STEP = LANES;
#endif

typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

inline Vec widened(const uint16_t* from) {
    Shorts shorts;
    memcpy(&shorts, from, sizeof shorts);
    return (Vec)(__builtin_convertvector(shorts, IntVec) << 16);
}

inline void narrow(Vec values, uint16_t* to) {  // to nearest, ties to even
    const IntVec bits = (IntVec)values;
    const Shorts shorts = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Shorts);
    memcpy(to, &shorts, sizeof shorts);
}

#if !defined(BF16_PAIRS)
inline Vec add_products(Vec sums, const uint16_t* a, const uint16_t* b) { return sums + widened(a) * widened(b); }
#endif

// inner[i * rank + r] = the product of down's row r with row i.
template <int ROWS> void shrink(const Part& p, const uint16_t* const* x, float* inner) {
    const int64_t whole = p.in / STEP * STEP;
    for (int64_t r = 0; r < p.rank; r += RANKS) {
        Vec sums[RANKS][ROWS] = {};
        for (int64_t k = 0; k < whole; k += STEP)
            for (int j = 0; j < RANKS; j++)
                for (int i = 0; i < ROWS; i++) sums[j][i] = add_products(sums[j][i], p.down + (r + j) * p.in + k, x[i] + k);
        for (int j = 0; j < RANKS; j++)
            for (int i = 0; i < ROWS; i++) {
                float sum = sum_of_lanes(sums[j][i]);
                for (int64_t k = whole; k < p.in; k++)
                    sum += bf16_to_float(p.down[(r + j) * p.in + k]) * bf16_to_float(x[i][k]);
                inner[i * p.rank + r + j] = sum;
            }
    }
}

template <int ROWS, int COUNT> void expand_block(const Part& p, const float* inner, uint16_t* const* out, int64_t n) {
    Vec sums[ROWS][COUNT] = {};
    for (int64_t r = 0; r < p.rank; r++)
        for (int v = 0; v < COUNT; v++) {
            const Vec weights = widened(p.up + r * p.out + n + v * LANES);
            for (int i = 0; i < ROWS; i++) sums[i][v] += weights * inner[i * p.rank + r];
        }
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < COUNT; v++) {
            uint16_t* to = out[i] + p.first + n + v * LANES;
            narrow(widened(to) + sums[i][v], to);
        }
}

template <int ROWS> void expand(const Part& p, const float* inner, uint16_t* const* out) {
    int64_t n = 0;
    for (; n + VECTORS * LANES <= p.out; n += VECTORS * LANES) expand_block<ROWS, VECTORS>(p, inner, out, n);
    for (; n + LANES <= p.out; n += LANES) expand_block<ROWS, 1>(p, inner, out, n);
    for (; n < p.out; n++)
        for (int i = 0; i < ROWS; i++) {
            float sum = 0;
            for (int64_t r = 0; r < p.rank; r++) sum += bf16_to_float(p.up[r * p.out + n]) * inner[i * p.rank + r];
            out[i][p.first + n] = float_to_bf16(bf16_to_float(out[i][p.first + n]) + sum);
        }
}

template <int ROWS> void adapt_rows(const Adapted& a, const int64_t* rows, const uint16_t* x, int64_t in,
                                    uint16_t* out, int64_t stride) {
    const uint16_t* from[ROWS];
    uint16_t* to[ROWS];
    for (int i = 0; i < ROWS; i++) from[i] = x + rows[i] * in, to[i] = out + rows[i] * stride;
    thread_local std::vector<float> inner;
    for (int64_t number = 0; number < a.num_parts; number++) {
        const Part& part = a.parts[number];
        if (!part.down) continue;
        inner.resize(ROWS * part.rank);
        shrink<ROWS>(part, from, inner.data());
        expand<ROWS>(part, inner.data(), to);
    }
}

int64_t num_weights(const Adapted& a) {
    int64_t count = 0;
    for (int64_t number = 0; number < a.num_parts; number++)
        if (a.parts[number].down) count += a.parts[number].rank * (a.parts[number].in + a.parts[number].out);
    return count;
}

}  // namespace

extern "C" {

extern const int64_t tandem_sizes[] = {sizeof(Part), sizeof(Adapted)};

void tandem_adapt(const uint16_t* x, int64_t in, uint16_t* out, int64_t stride, const Adapted* adapted,
                  int64_t num_adapted, int64_t threads, Parallel parallel) {
    struct Tile {
        const Adapted* adapted;
        const int64_t* rows;
        int64_t count;
    };
    std::vector<Tile> tiles;
    int64_t products = 0;
    for (const Adapted* a = adapted; a < adapted + num_adapted; a++) {
        products += num_weights(*a) * a->count;
        for (int64_t first = 0; first < a->count; first += MOST_ROWS)
            tiles.push_back({a, a->rows + first, std::min(MOST_ROWS, a->count - first)});
    }
    if (products < SERIAL_PRODUCTS) threads = 1;
    share_out(int64_t(tiles.size()), std::min<int64_t>(threads, tiles.size()), parallel, [&](int64_t number) {
        const Tile& tile = tiles[number];
        switch (tile.count) {
            case 1: return adapt_rows<1>(*tile.adapted, tile.rows, x, in, out, stride);
            case 2: return adapt_rows<2>(*tile.adapted, tile.rows, x, in, out, stride);
            case 3: return adapt_rows<3>(*tile.adapted, tile.rows, x, in, out, stride);
            default: return adapt_rows<MOST_ROWS>(*tile.adapted, tile.rows, x, in, out, stride);
        }
    });
}
}
