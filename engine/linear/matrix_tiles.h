// Tiles for AMX-BF16: one instruction multiplies 16 rows by the next 32 weights of 16 outputs, read in the panels'
// layout. Fewer rows are computed as 16, which takes no longer than loading the weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

#include "../../native/tile_registers.h"
#include "one_row.h"
#include "outputs.h"
#include "product.h"
#include "shares.h"

namespace {

class MatrixTiles {
  public:
    using Input = uint16_t;
    static constexpr bool EXPANDS = false, ROUNDS = false, TAKES_RUNS = true;
    static constexpr int64_t FEW_ROWS = 16, LONGEST_RUN = INT64_MAX;
    static constexpr int DEPTH = 32;  // inputs multiplied at once

    struct Registers : TileRegisters, DenormalsAreZero {
        explicit Registers(const Product& p) { shape(int(std::clamp<int64_t>(p.rows, 1, ROWS))); }
    };

    static bool can_multiply(const Product& p) { return TileRegisters::are_granted() && p.in_features % DEPTH == 0; }

    // Returns the inputs of rows [row, end), valid until the next call.
    const Input* inputs(const Product& p, int64_t row, int64_t end) {
        const int64_t K = p.in_features, left = (end - row) % ROWS;
        if (left && p.rows > ROWS) {
            last_rows.resize(ROWS * K);
            memcpy(last_rows.data(), p.x + (end - left) * K, left * K * sizeof(Input));
        }
        if (p.run && end - row == 1) one_row.take(p, row);
        tiles_will_load();
        return p.x + row * K;
    }

    // Computes rows [first, end) of one panel; `x` has the inputs from row `first` on: all rows by the weights of some
    // inputs, which stay in the L1 cache, then all by those of the next inputs.
    void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        if (end - first <= ROWS) return few_rows_of_panel(p, x, first, end, panel);
        const int64_t K = p.in_features, tiles = (end - first + ROWS - 1) / ROWS;
        const auto row_of = [&](int64_t tile) { return first + tile * ROWS; };
        const auto put_tile = [&](int64_t tile) { put<4>(p, sums[tile % 2], row_of(tile), end, panel * PANEL); };
        for (int64_t from = 0; from < K; from += L1_INPUTS) {
            const bool last = from + L1_INPUTS >= K;
            for (int64_t tile = 0; tile < tiles; tile++) {
                from ? load(sums[tile]) : clear();
                const Input* rows = inputs(p, x, first, row_of(tile), end);
                one_by_four(rows, K, from, std::min(L1_INPUTS, K - from), [&](int64_t k) {
                    const uint16_t* w = p.weights + (panel * K + k) * PANEL;
                    const uint16_t* next = w + L1_INPUTS * PANEL;  // a share of the next weights comes to the L2 cache
                    for (int64_t line = LINES * tile / tiles; line < LINES * (tile + 1) / tiles; line++)
                        __builtin_prefetch(next + line * LINE_VALUES, 0, 2);
                    return w;
                });
                store(sums[last ? tile % 2 : tile]);
                // Stored tiles can be read only late, so the next rows are multiplied first.
                if (last && tile) put_tile(tile - 1);
            }
        }
        put_tile(tiles - 1);
    }

    // Computes one row with quantized weights, with the bits that `rows_of_runs` gives it.
    template <class Codes> void row_of_codes(const Product& p, const Coded& w, int64_t row, int64_t panel) const {
        one_row.panel_of_codes<Codes>(p, w, row, panel);
    }

    // Computes the same rows with quantized weights. weights(k) returns the panel's weights for the DEPTH inputs from k
    // on. For FEW_ROWS it is called once for each, in ascending order, so that the CPU expands the next weights while
    // it multiplies.
    template <class Weights>
    void rows_of_runs(const Product& p, const Coded& w, const Input* x, int64_t first, int64_t end, int64_t panel,
                      const Weights& weights) const {
        const int64_t K = p.in_features, whole = end_of_pairs(first, end);
        const auto at = [&](int n) {
            return [&, n](int64_t k) {
                const uint16_t* of_step = weights(k);
                tiles_will_load();
                return of_step + 2 * n;
            };
        };
        for (int64_t row = first; row < whole; row += 2 * ROWS) {
            const Input *upper = inputs(p, x, first, row, end), *lower = inputs(p, x, first, row + ROWS, end);
            for (int n = 0; n < PANEL; n += 2 * OUTPUTS)
                add_runs<2>(p, w, row, end, panel, n, [&](int64_t k, int64_t count) {
                    two_by_two(upper, lower, K, k, count, at(n));
                });
        }
        if (whole < end)
            add_runs<4>(p, w, whole, end, panel, 0, [&](int64_t k, int64_t count) {
                one_by_four(inputs(p, x, first, whole, end), K, k, count, at(0));
            });
    }

  private:
    static constexpr int ROWS = TileRegisters::ROWS, OUTPUTS = Outputs::COUNT;
    static constexpr int64_t STEP = DEPTH * PANEL;                   // a panel's weights in one step
    static constexpr int64_t STRIDE = 2 * PANEL * sizeof(uint16_t);  // bytes between a tile's rows of weights
    static constexpr int64_t LINES = STEP / LINE_VALUES;
    static constexpr int64_t L1_INPUTS = 192;  // a panel's weights for these take 24 KB
    static constexpr int64_t AHEAD = 3;  // prefetch distance for few rows, in steps
    using Tile = float[ROWS][OUTPUTS];
    using Sums = Tile[4];

    // Computes the rows of one tile.
    void few_rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        const int64_t K = p.in_features;
        clear();
        one_by_four(inputs(p, x, first, first, end), K, 0, K, [&](int64_t k) {
            const uint16_t* w = p.weights + (panel * K + k) * PANEL;
            for (int64_t i = 0; i < STEP; i += LINE_VALUES) __builtin_prefetch(w + AHEAD * STEP + i);
            return w;
        });
        store(sums[0]);
        put<4>(p, sums[0], first, end, panel * PANEL);
    }

    // Returns the end of the rows that are multiplied as pairs of tiles.
    static int64_t end_of_pairs(int64_t first, int64_t end) {
        return first + (end - first + ROWS - 1) / (2 * ROWS) * (2 * ROWS);
    }

    const Input* inputs(const Product& p, const Input* x, int64_t first, int64_t row, int64_t end) const {
        return end - row < ROWS && p.rows > ROWS ? last_rows.data() : x + (row - first) * p.in_features;
    }

    // Multiplies run by run, and adds up the scaled sums of four tiles, COLUMNS of them beside each other from output
    // `n` of the panel on. The next run is multiplied before a run's stored tiles are read, and stored after that:
    // of the orders measured, this is the fastest.
    template <int COLUMNS, class Multiply>
    static void add_runs(const Product& p, const Coded& w, int64_t row, int64_t end, int64_t panel, int n,
                         const Multiply& multiply) {
        alignas(64) Sums totals = {}, sums;
        for (int64_t i = 0; i <= w.runs; i++) {
            if (i < w.runs) {
                clear();
                multiply(i * w.run, std::min(w.run, p.in_features - i * w.run));
            }
            if (i) add_run<COLUMNS>(w, i - 1, row, end, n, sums, totals);
            if (i < w.runs) store(sums);
        }
        put<COLUMNS>(p, totals, row, end, panel * PANEL + n);
    }

    template <int COLUMNS>
    static void add_run(const Coded& w, int64_t run, int64_t row, int64_t end, int n, const Sums& sums, Sums& totals) {
        for (int tile = 0; tile < 4; tile++) {
            const int64_t from = row + tile / COLUMNS * ROWS, rows = std::min<int64_t>(end - from, ROWS);
            const int64_t scale = run * w.run / w.group * PANEL + n + tile % COLUMNS * OUTPUTS;
            const auto factors = (__m512)w.scales.factors(scale);
            const auto offsets = w.scales.have_minima() ? (__m512)w.scales.offsets(scale) : _mm512_setzero_ps();
            const float* input_sum = w.input_sums + from * w.runs + run;
            const auto add = [&, have_minima = w.scales.have_minima(), runs = w.runs](int64_t r) {
                const __m512 sum = _mm512_loadu_ps(sums[tile][r]);
                __m512 total = _mm512_fmadd_ps(sum, factors, _mm512_loadu_ps(totals[tile][r]));
                if (have_minima) total = _mm512_fmadd_ps(_mm512_set1_ps(input_sum[r * runs]), offsets, total);
                _mm512_storeu_ps(totals[tile][r], total);
            };
            if (rows == ROWS) {
#pragma GCC unroll 16
                for (int64_t r = 0; r < ROWS; r++) add(r);
            } else {
                for (int64_t r = 0; r < rows; r++) add(r);
            }
        }
    }

    // Writes four tiles' sums, COLUMNS of them beside each other from output `n` on.
    template <int COLUMNS>
    static void put(const Product& p, const Sums& sums, int64_t row, int64_t end, int64_t n) {
        for (int tile = 0; tile < 4; tile += 2) {
            const int64_t from = row + tile / COLUMNS * ROWS;
            const Outputs outputs(p, n + tile % COLUMNS * OUTPUTS);
            for (int64_t r = 0; r < std::min<int64_t>(end - from, ROWS); r++)
                outputs.put(from + r, _mm512_loadu_ps(sums[tile][r]), _mm512_loadu_ps(sums[tile + 1][r]));
        }
    }

    // Multiplies 16 rows by a panel's 64 outputs. Tile registers 0 to 3 hold the sums.
    template <class Weights>
    static void one_by_four(const Input* x, int64_t stride, int64_t begin, int64_t count, const Weights& weights) {
        for (int64_t k = begin; k < begin + count; k += DEPTH)
            multiply_tiles<4>(x + k, stride * sizeof(Input), weights(k), STRIDE);
    }

    // Multiplies 32 rows, 16 in `upper` and 16 in `lower`, by 32 outputs.
    template <class Weights>
    static void two_by_two(
        const Input* upper, const Input* lower, int64_t stride, int64_t begin, int64_t count, const Weights& weights) {
        for (int64_t k = begin; k < begin + count; k += DEPTH) {
            const uint16_t* w = weights(k);
            _tile_loadd(4, upper + k, stride * sizeof(Input));
            _tile_loadd(5, w, STRIDE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, w + 2 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, lower + k, stride * sizeof(Input));
            _tile_dpbf16ps(2, 7, 5);
            _tile_dpbf16ps(3, 7, 6);
        }
    }

    static void clear() { clear_sums<4>(); }
    static void load(const Sums& sums) { load_sums<4>(sums[0][0], ROWS * OUTPUTS, OUTPUTS * sizeof(float)); }
    static void store(Sums& sums) { store_sums<4>(sums[0][0], ROWS * OUTPUTS, OUTPUTS * sizeof(float)); }

    alignas(64) Sums sums[BLOCK_ROWS / ROWS];
    OneRow one_row;
    std::vector<Input> last_rows;  // inputs of an incomplete tile, followed by rows that are ignored
};

}  // namespace
