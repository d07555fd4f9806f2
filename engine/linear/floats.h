// Tiles in float32: for float32 weights, and on CPUs that can't multiply bfloat16. Then inputs are widened once for all
// panels, and weights in registers: one shift or mask makes float32 of 16 (or 8), for all rows of the tile.

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

template <class Value> class FloatTiles {
    using Product = ProductOf<Value>;
    static constexpr bool WIDENS = sizeof(Value) == 2;
    static constexpr int TOGETHER = WIDENS ? 2 : 1;  // adjacent weights of an output

  public:
    using Input = float;
    using Int4Codes = Int4;
    static constexpr bool EXPANDS = false, ROUNDS = false, TAKES_RUNS = false;
    static constexpr int64_t LONGEST_RUN = 128;  // each run's weights are prefetched once
    struct Registers {
        explicit Registers(const Product&) {}
    };

    // Returns the inputs of rows [row, end), valid until the next call.
    const Input* inputs(const Product& p, int64_t row, int64_t end) {
        const Value* x = p.x + row * p.in_features;
        if constexpr (!WIDENS) return x;
        const size_t count = (end - row) * p.in_features;
        if (widened.size() < count) widened.resize(count);
        float* to = widened.data();  // kept in a local: each access to a thread_local object takes a call
        for (size_t i = 0; i < count; i++) to[i] = wide(x[i]);
        return to;
    }

    // Computes rows [first, end) of one panel; `x` has the inputs from row `first` on.
    static void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile<rows()>(p, x + (row - first) * p.in_features, row, panel);
        });
    }

    // Computes the same rows for a run with the panel's weights `w`.
    static void rows_of_run(
        const Product& p, const uint16_t* w, const Input* x, int64_t first, int64_t end, const Run& run) {
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile_of_run<rows()>(p, w, x + (row - first) * p.in_features + run.k, row - first, run);
        });
    }

    // Computes at most MOST_ROWS rows for a run, expanding codes to float32 in registers.
    template <class Codes> static void rows_of_coded_run(
        const Product& p, const uint16_t* words, const Input* x, int64_t first, int64_t end, const Run& run) {
        in_tiles<MOST_ROWS>(first, end, [&](auto rows, int64_t row) {
            tile_of_coded_run<Codes, rows()>(p, words, x + (row - first) * p.in_features + run.k, row - first, run);
        });
    }

    // Writes the outputs of rows [row, end); `totals` begin at row `row`.
    static void put_totals(const Product& p, const float* totals, int64_t row, int64_t end, int64_t panel) {
        const int64_t first = panel * PANEL, count = std::min<int64_t>(p.out_features - first, PANEL);
        for (; row < end; row++, totals += PANEL) put(p, totals, p.out + row * p.out_features + first, first, count);
    }

    static constexpr int MOST_ROWS = 6;

  private:
    // Number of vectors of outputs that a tile sums at a time: as many as fit into the registers, since each addition
    // waits for the previous one.
    template <int ROWS> static constexpr int VECTORS = LANES == 16 ? 4 : ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
    template <int ROWS> static constexpr int WIDTH = VECTORS<ROWS> * LANES;
    static constexpr int64_t FETCHED = 12288 / sizeof(Value);  // prefetch distance, in weights
    static constexpr int64_t RUN = 16384 / (PANEL * sizeof(Value));  // its weights stay in the first cache
    static constexpr int64_t AHEAD = 1 << 11;  // prefetch distance, in words of codes: 4 KiB
    template <int ROWS> using Sums = Vec[ROWS][VECTORS<ROWS>];

    // If the vectors hold only a part of a panel's outputs, the parts take turns, so memory is read in its order.
    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features, at_once = WIDTH<ROWS> == PANEL ? K : RUN;
        float totals[ROWS][PANEL] = {};
        for (int64_t k = 0; k < K; k += at_once) {
            const Value* w = p.weights + (panel * K + k) * PANEL;
            const int64_t count = std::min(at_once, K - k);
            for (int part = 0; part < PANEL; part += WIDTH<ROWS>) {
                Sums<ROWS> sums;
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS<ROWS>; v++) sums[r][v] = load(totals[r] + part + v * LANES);
                multiply<true>(w + TOGETHER * part, w + FETCHED + part * count, x + k, K, count, sums);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS<ROWS>; v++) store(totals[r] + part + v * LANES, sums[r][v]);
            }
        }
        put_totals(p, totals[0], row, row + ROWS, panel);
    }

    template <int ROWS> static void tile_of_run(
        const Product& p, const uint16_t* w, const Input* x, int64_t row, const Run& run) {
        for (int part = 0; part < PANEL; part += WIDTH<ROWS>) {
            Sums<ROWS> sums = {};
            multiply<false>(w + 2 * part, w, x, p.in_features, run.count, sums);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS<ROWS>; v++) add(run, row + r, part + v * LANES, sums[r][v]);
        }
    }

    template <class Codes, int ROWS> static void tile_of_coded_run(
        const Product& p, const uint16_t* words, const Input* x, int64_t row, const Run& run) {
        const uint16_t* ahead = words + AHEAD;
        for (int part = 0; part < PANEL; part += WIDTH<ROWS>) {
            Sums<ROWS> sums = {};
            const uint16_t* from = words + 2 * part;
            for (int64_t k = 0; k < run.count; k += 2 * Codes::CODES, from += WORDS, ahead += 2 * WIDTH<ROWS>) {
                for (int i = 0; i < 2 * WIDTH<ROWS>; i += LINE_VALUES) __builtin_prefetch(ahead + i);
                IntVec pairs[VECTORS<ROWS>];
                for (int v = 0; v < VECTORS<ROWS>; v++) pairs[v] = load((const int32_t*)from + v * LANES);
                each_of([&](auto i) {
                    for (int v = 0; v < VECTORS<ROWS>; v++) {
                        const Vec weights = Codes::template floats<i()>(pairs[v]);
                        for (int r = 0; r < ROWS; r++) sums[r][v] += weights * x[r * p.in_features + k + i()];
                    }
                }, std::make_integer_sequence<int, 2 * Codes::CODES>{});
            }
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS<ROWS>; v++) add(run, row + r, part + v * LANES, sums[r][v]);
        }
    }

    // Adds the products of `count` weights of WIDTH outputs with each row's inputs; rows have stride `stride`.
    template <bool FETCH, int ROWS> static void multiply(
        const Value* w, const Value* ahead, const Input* x, int64_t stride, int64_t count, Sums<ROWS>& sums) {
        constexpr int LINE = 64 / sizeof(Value);
        for (int64_t k = 0; k < count; k += TOGETHER, w += TOGETHER * PANEL, ahead += TOGETHER * WIDTH<ROWS>) {
            for (int i = 0; FETCH && i < TOGETHER * WIDTH<ROWS>; i += LINE) __builtin_prefetch(ahead + i);
            for (int half = 0; half < TOGETHER; half++) {
                Vec weights[VECTORS<ROWS>];
                for (int v = 0; v < VECTORS<ROWS>; v++) weights[v] = values_of(w + TOGETHER * v * LANES, half);
                for (int r = 0; r < ROWS; r++)
                    for (int v = 0; v < VECTORS<ROWS>; v++) sums[r][v] += weights[v] * x[r * stride + k + half];
            }
        }
    }

    // Adds a row's sums, scaled, to its totals. `row` is the row within the block, `n` the output within the panel.
    static void add(const Run& run, int64_t row, int64_t n, Vec sums) {
        float* totals = run.totals + row * PANEL + n;
        Vec total = load(totals) + sums * run.scales.factors(n);
        if (run.scales.have_offsets()) total += run.scales.offsets(n) * run.input_sums[row * run.sums_stride];
        memcpy(totals, &total, sizeof total);
    }

    // Writes the panel's `count` outputs from output `first` on.
    static void put(const Product& p, const float* sums, Value* out, int64_t first, int64_t count) {
        if (WIDENS && !p.bias && count == PANEL) return narrow(sums, out);
        float biased[PANEL];
        memcpy(biased, sums, sizeof biased);
        for (int64_t n = 0; p.bias && n < count; n++) biased[n] += wide(p.bias[first + n]);
        Value narrowed[PANEL];
        narrow(biased, narrowed);
        memcpy(out, narrowed, count * sizeof *narrowed);
    }

    static float wide(uint16_t value) { return bf16_to_float(value); }
    static float wide(float value) { return value; }

    static void narrow(const float* panel, float* to) { memcpy(to, panel, PANEL * sizeof *to); }

    // Rounds a panel's values to nearest, ties to even. A NaN, from a bfloat16, has zero low bits, so it stays NaN.
    static void narrow(const float* panel, uint16_t* to) {
        typedef uint16_t ShortVec __attribute__((vector_size(LANES * 2)));
        for (int n = 0; n < PANEL; n += LANES) {
            const IntVec bits = load((const int32_t*)panel + n);
            const IntVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            const auto shorts = __builtin_convertvector(rounded, ShortVec);
            memcpy(to + n, &shorts, sizeof shorts);
        }
    }

    static Vec values_of(const float* from, int) { return load(from); }

    static Vec values_of(const uint16_t* from, int half) {
        IntVec pairs;
        memcpy(&pairs, from, sizeof pairs);
        return (Vec)(half ? pairs & ~0xffff : pairs << 16);
    }

    std::vector<float> widened;
};

using Floats = FloatTiles<uint16_t>;

}  // namespace
