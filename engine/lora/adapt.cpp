// out[row][first + n - begin] += sum over r of up[r][n] * (sum over k of down[r][k] * x[row][k]): bfloat16 in and out,
// float32 sums. A product of rank 16 would fill only a quarter of a panel of the linear layers' kernel, so LoRA has its
// own. Two rows share an adapter's weights where sixteen share the model's, so reading them takes most of the time:
// packed.py stores them in reading order, and the kernel prefetches them. A row's sums are in the same order in every
// batch, so its result has the same bits.

#include "adapt.h"

#include <algorithm>
#include <vector>

#include "../devices/cpu/attention/simd.h"

namespace {

constexpr int64_t MOST_ROWS = 4;  // rows that share each read of the weights
constexpr int RANKS = 4;          // ranks summed in parallel
constexpr int64_t INPUTS = 32;    // adjacent inputs of a rank: a cache line
constexpr int64_t OUTPUTS = 64;   // outputs of a panel
constexpr int PAIR = 2 * LANES;   // values of a vector of pairs
constexpr int PAIRS = LANES == 16 ? 2 : 1;   // vectors of outputs whose sums fit into the registers
constexpr int64_t AHEAD = 3072;   // prefetch distance, in weights
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;  // fewest multiplications that are worth several threads

typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

// Returns the first (half 0) or the second value of each adjacent pair, as floats.
inline Vec half_of_pairs(const uint16_t* from, int half) {
    Words pairs;
    memcpy(&pairs, from, sizeof pairs);
    return (Vec)(half ? pairs & 0xffff0000 : pairs << 16);
}

inline Words rounded(Vec values) {  // to nearest, ties to even, in the high halves
    const Words bits = (Words)values;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

inline void add_to_pairs(uint16_t* to, const Vec* halves) {
    const Words first = rounded(half_of_pairs(to, 0) + halves[0]), second = rounded(half_of_pairs(to, 1) + halves[1]);
    const Words pairs = (first >> 16) | (second & 0xffff0000);
    memcpy(to, &pairs, sizeof pairs);
}

template <int ROWS> using Sums = Vec[RANKS][ROWS];

template <int ROWS> void add_inputs(const uint16_t* down, const uint16_t* const* x, int64_t k, Sums<ROWS>& sums) {
    for (int64_t i = 0; i < RANKS; i++) __builtin_prefetch(down + AHEAD + i * INPUTS);
    for (int from = 0; from < INPUTS; from += PAIR) {
#if defined(BF16_PAIRS)
        for (int j = 0; j < RANKS; j++)
            for (int i = 0; i < ROWS; i++) {
                __m512bh weights, inputs;
                memcpy(&weights, down + j * INPUTS + from, sizeof weights), memcpy(&inputs, x[i] + k + from, sizeof inputs);
                sums[j][i] = (Vec)_mm512_dpbf16_ps((__m512)sums[j][i], weights, inputs);
            }
#else
        for (int half = 0; half < 2; half++)
            for (int j = 0; j < RANKS; j++) {
                const Vec weights = half_of_pairs(down + j * INPUTS + from, half);
                for (int i = 0; i < ROWS; i++) sums[j][i] += weights * half_of_pairs(x[i] + k + from, half);
            }
#endif
    }
}

// Writes inner[i * rank + r], the product of row i with rank r of down.
template <int ROWS> void shrink(const Part& p, const uint16_t* const* x, float* inner) {
    const int64_t whole = p.inputs / INPUTS * INPUTS, left = p.inputs - whole;
    uint16_t padded[ROWS][INPUTS] = {};
    const uint16_t* last[ROWS];
    for (int i = 0; i < ROWS; i++) last[i] = padded[i], memcpy(padded[i], x[i] + whole, left * sizeof **x);
    const uint16_t* down = p.down;
    for (int64_t r = 0; r < p.rank; r += RANKS) {
        Sums<ROWS> sums = {};
        for (int64_t k = 0; k < whole; k += INPUTS, down += RANKS * INPUTS) add_inputs<ROWS>(down, x, k, sums);
        if (left) add_inputs<ROWS>(down, last, 0, sums), down += RANKS * INPUTS;
        for (int j = 0; j < RANKS; j++)
            for (int i = 0; i < ROWS; i++) inner[i * p.rank + r + j] = sum_of_lanes(sums[j][i]);
    }
}

template <int ROWS> void expand_panel(const uint16_t* up, int64_t rank, const float* inner, uint16_t* const* out) {
    for (int64_t n = 0; n < OUTPUTS; n += PAIRS * PAIR) {
        Vec sums[ROWS][PAIRS][2] = {};
        for (int64_t r = 0; r < rank; r++) {
            const uint16_t* from = up + r * OUTPUTS + n;
            for (int64_t i = 0; i < PAIRS * PAIR; i += INPUTS) __builtin_prefetch(from + AHEAD + i);
            for (int pair = 0; pair < PAIRS; pair++)
                for (int half = 0; half < 2; half++) {
                    const Vec weights = half_of_pairs(from + pair * PAIR, half);
                    for (int i = 0; i < ROWS; i++) sums[i][pair][half] += weights * inner[i * rank + r];
                }
        }
        for (int i = 0; i < ROWS; i++)
            for (int pair = 0; pair < PAIRS; pair++) add_to_pairs(out[i] + n + pair * PAIR, sums[i][pair]);
    }
}

template <int ROWS> void expand(const Part& p, const float* inner, uint16_t* const* out) {
    for (int64_t panel = p.begin / OUTPUTS * OUTPUTS; panel < p.end; panel += OUTPUTS) {
        const uint16_t* up = p.up + panel * p.rank;
        const int64_t begin = std::max(panel, p.begin), count = std::min(panel + OUTPUTS, p.end) - begin;
        uint16_t *to[ROWS], *padded[ROWS], some[ROWS][OUTPUTS];
        for (int i = 0; i < ROWS; i++) to[i] = out[i] + p.first + begin - p.begin;
        if (count == OUTPUTS) {
            expand_panel<ROWS>(up, p.rank, inner, to);
            continue;
        }
        for (int i = 0; i < ROWS; i++) padded[i] = some[i], memcpy(some[i] + begin - panel, to[i], count * sizeof **to);
        expand_panel<ROWS>(up, p.rank, inner, padded);
        for (int i = 0; i < ROWS; i++) memcpy(to[i], some[i] + begin - panel, count * sizeof **to);
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
    for (const Part* p = a.parts; p < a.parts + a.num_parts; p++)
        if (p->down) count += p->rank * (p->inputs + p->end - p->begin);
    return count;
}

}  // namespace

extern "C" {

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
