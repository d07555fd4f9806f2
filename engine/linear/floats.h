// A tile in float32, for CPUs that can't multiply bfloat16. Inputs are widened once for all panels. Weights are
// widened in registers: one shift or mask makes float32 of 16 (or 8), for all rows of the tile.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../devices/cpu/attention/simd.h"
#include "codes.h"
#include "product.h"
#include "row_tiles.h"
#include "shares.h"

namespace {

class Floats {
  public:
    using Input = float;
    static constexpr bool EXPANDS = false, ROUNDS = false, WIDENS = true;
    static constexpr int64_t FEW_ROWS = BLOCK_ROWS, LONGEST_RUN = 128;  // each run's weights are asked for once
    struct Registers {
        explicit Registers(const Product&) {}
    };

    // The inputs of rows [row, end); valid until the next call.
    const Input* inputs(const Product& p, int64_t row, int64_t end) {
        const uint16_t* x = p.x + row * p.in_features;
        const size_t count = (end - row) * p.in_features;
        if (widened.size() < count) widened.resize(count);
        float* to = widened.data();  // read once: each access to a thread_local object takes a call
        for (size_t i = 0; i < count; i++) to[i] = bf16_to_float(x[i]);
        return to;
    }

    // The rows [first, end) of one panel; `x` are the inputs of the first.
    static void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile<rows()>(p, x + (row - first) * p.in_features, row, panel);
        });
    }

    // The same rows, of a run. weights(k, count) are those of the panel for the inputs [k, k + count).
    template <class Weights> static void rows_of_run(
        const Product& p, const Input* x, int64_t first, int64_t end, const Run& run, const Weights& weights) {
        const uint16_t* w = weights(run.k, run.count);
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile_of_run<rows()>(p, w, x + (row - first) * p.in_features + run.k, row - first, run);
        });
    }

    // The same for at most MOST_ROWS rows, of a run whose codes become float32 in registers.
    template <class Codes> static void rows_of_coded_run(
        const Product& p, const uint16_t* words, const Input* x, int64_t first, int64_t end, const Run& run) {
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile_of_coded_run<Codes, rows()>(p, words, x + (row - first) * p.in_features + run.k, row - first, run);
        });
    }

    // Of the rows [row, end); totals are those of the first on.
    static void put_totals(const Product& p, const float* totals, int64_t row, int64_t end, int64_t panel) {
        for (int64_t r = row; r < end; r++, totals += PANEL)
            for (int part = 0; part < PANEL; part += WIDTH) {
                Vec sums[VECTORS];
                for (int v = 0; v < VECTORS; v++) sums[v] = load(totals + part + v * LANES);
                put(p, sums, r, panel * PANEL + part);
            }
    }

    static constexpr int MOST_ROWS = 6;

  private:
    static constexpr int VECTORS = LANES == 16 ? 4 : 2;  // with the sums of 6 rows they fit into the registers
    static constexpr int WIDTH = VECTORS * LANES;
    static constexpr int64_t FETCHED = 6144;  // in weights: how far ahead is prefetched
    static constexpr int64_t AHEAD = 1 << 11;  // in words, 4 KiB: the same for codes
    template <int ROWS> using Sums = Vec[ROWS][VECTORS];

    // Where vectors don't hold a panel's outputs, its parts take turns: memory is read in its order.
    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features, at_once = WIDTH == PANEL ? K : LONGEST_RUN;
        float totals[ROWS][PANEL] = {};
        for (int64_t k = 0; k < K; k += at_once) {
            const uint16_t* w = p.weights + (panel * K + k) * PANEL;
            const int64_t count = std::min(at_once, K - k);
            for (int part = 0; part < PANEL; part += WIDTH) {
                Sums<ROWS> sums;
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS; v++) sums[r][v] = load(totals[r] + part + v * LANES);
                multiply<true>(w + 2 * part, w + FETCHED + part * count, x + k, K, count, sums);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS; v++) store(totals[r] + part + v * LANES, sums[r][v]);
            }
        }
        put_totals(p, totals[0], row, row + ROWS, panel);
    }

    template <int ROWS> static void tile_of_run(
        const Product& p, const uint16_t* w, const Input* x, int64_t row, const Run& run) {
        for (int part = 0; part < PANEL; part += WIDTH) {
            Sums<ROWS> sums = {};
            multiply<false>(w + 2 * part, w, x, p.in_features, run.count, sums);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) add(run, row + r, part + v * LANES, sums[r][v]);
        }
    }

    template <class Codes, int ROWS> static void tile_of_coded_run(
        const Product& p, const uint16_t* words, const Input* x, int64_t row, const Run& run) {
        const uint16_t* ahead = words + AHEAD;
        for (int part = 0; part < PANEL; part += WIDTH) {
            Sums<ROWS> sums = {};
            const uint16_t* from = words + 2 * part;
            for (int64_t k = 0; k < run.count; k += 2 * Codes::CODES, from += WORDS, ahead += 2 * WIDTH) {
                for (int i = 0; i < 2 * WIDTH; i += LINE_VALUES) __builtin_prefetch(ahead + i);
                IntVec pairs[VECTORS];
                for (int v = 0; v < VECTORS; v++) pairs[v] = load((const int32_t*)from + v * LANES);
                each_of([&](auto i) {
                    for (int v = 0; v < VECTORS; v++) {
                        const Vec weights = Codes::template floats<i()>(pairs[v]);
                        for (int r = 0; r < ROWS; r++) sums[r][v] += weights * x[r * p.in_features + k + i()];
                    }
                }, std::make_integer_sequence<int, 2 * Codes::CODES>{});
            }
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) add(run, row + r, part + v * LANES, sums[r][v]);
        }
    }

    // Adds up `count` weights of WIDTH outputs, and as many inputs of each row, which lie `stride` apart.
    template <bool FETCH, int ROWS> static void multiply(
        const uint16_t* w, const uint16_t* ahead, const Input* x, int64_t stride, int64_t count, Sums<ROWS>& sums) {
        for (int64_t k = 0; k < count; k += 2, w += 2 * PANEL, ahead += 2 * WIDTH) {
            for (int i = 0; FETCH && i < 2 * WIDTH; i += LINE_VALUES) __builtin_prefetch(ahead + i);
            for (int half = 0; half < 2; half++) {
                Vec weights[VECTORS];
                for (int v = 0; v < VECTORS; v++) weights[v] = half_of_pairs(w + 2 * v * LANES, half);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS; v++) sums[r][v] += weights[v] * x[r * stride + k + half];
            }
        }
    }

    // Adds sums of a block's row to its totals; n is an output of the panel.
    static void add(const Run& run, int64_t row, int64_t n, Vec sums) {
        float* totals = run.totals + row * PANEL + n;
        Vec total = load(totals) + sums * load(run.scales + n);
        if (run.offsets) total -= load(run.offsets + n) * run.input_sums[row * run.sums_stride];
        memcpy(totals, &total, sizeof total);
    }

    static void put(const Product& p, const Vec* sums, int64_t row, int64_t first) {
        uint16_t* const out = p.out + row * p.out_features + first;
        if (!p.bias && first + WIDTH <= p.out_features) {
            for (int v = 0; v < VECTORS; v++) narrow(sums[v], out + v * LANES);
            return;
        }
        const size_t count = std::clamp<int64_t>(p.out_features - first, 0, WIDTH);
        float biases[WIDTH] = {};
        for (size_t n = 0; p.bias && n < count; n++) biases[n] = bf16_to_float(p.bias[first + n]);
        uint16_t narrowed[WIDTH];
        for (int v = 0; v < VECTORS; v++) narrow(p.bias ? sums[v] + load(biases + v * LANES) : sums[v], narrowed + v * LANES);
        memcpy(out, narrowed, count * sizeof *narrowed);
    }

    // To nearest, ties to even. A NaN stays NaN: its low bits are zero, since it came from a bfloat16.
    static void narrow(Vec values, uint16_t* to) {
        typedef uint16_t ShortVec __attribute__((vector_size(LANES * 2)));
        const IntVec bits = (IntVec)values;
        const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const auto shorts = __builtin_convertvector(rounded, ShortVec);
        memcpy(to, &shorts, sizeof shorts);
    }

    static Vec half_of_pairs(const uint16_t* from, int half) {
        IntVec pairs;
        memcpy(&pairs, from, sizeof pairs);
        return (Vec)(half ? pairs & ~0xffff : pairs << 16);
    }

    std::vector<float> widened;
};

}  // namespace
