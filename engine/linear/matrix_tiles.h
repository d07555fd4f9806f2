// Tiles for AMX-BF16: one instruction multiplies 16 rows by the next 32 weights of 16 outputs, read in the panels'
// layout. Fewer rows are computed as 16, which takes no longer than loading the weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

#include "../../native/tile_registers.h"
#include "outputs.h"
#include "product.h"

namespace {

class MatrixTiles {
  public:
    using Input = uint16_t;
    static constexpr bool EXPANDS = false, ROUNDS = false, WIDENS = false;
    static constexpr int64_t FEW_ROWS = 16, LONGEST_RUN = INT64_MAX;

    struct Registers : TileRegisters {
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
        tiles_will_load();
        return p.x + row * K;
    }

    // Computes rows [first, end) of one panel; `x` has the inputs from row `first` on.
    void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) const {
        const auto weights = [&](int64_t k, int64_t turn, int64_t turns) {
            const uint16_t* w = p.weights + (panel * p.in_features + k) * PANEL;
            const bool many = turns > 1;  // then each turn fetches a share of the next panel to the L2 cache
            const uint16_t* next = w + (many ? PANEL * p.in_features : AHEAD * STEP);
            for (int64_t line = LINES * turn / turns; line < LINES * (turn + 1) / turns; line++)
                many ? __builtin_prefetch(next + line * LINE_VALUES, 0, 2) : __builtin_prefetch(next + line * LINE_VALUES);
            return w;
        };
        tiles(p, x, first, end, 0, p.in_features, weights, [&](const Tile* sums, int64_t row, int n) {
            const Outputs outputs(p, panel * PANEL + n);
            for (int r = 0; r < std::min<int64_t>(end - row, ROWS); r++)
                outputs.put(row + r, _mm512_loadu_ps(sums[0][r]), _mm512_loadu_ps(sums[1][r]));
        });
    }

    // Computes the same rows for a run. weights(k, count) returns the panel's weights for inputs [k, k + count). It is
    // called step by step, once for FEW_ROWS, so that the CPU expands the next weights while it multiplies.
    template <class Weights>
    void rows_of_run(
        const Product& p, const Input* x, int64_t first, int64_t end, const Run& run, const Weights& weights) const {
        const auto of_step = [&](int64_t k, int64_t, int64_t) {
            const uint16_t* w = weights(k, DEPTH);
            tiles_will_load();
            return w;
        };
        tiles(p, x, first, end, run.k, run.count, of_step, [&](const Tile* sums, int64_t row, int n) {
            for (int r = 0; r < std::min<int64_t>(end - row, ROWS); r++)
                for (int i = 0; i < 2; i++)
                    Outputs::add(run, row - first + r, n + i * OUTPUTS, _mm512_loadu_ps(sums[i][r]));
        });
    }

    static void put_totals(const Product& p, const float* totals, int64_t row, int64_t end, int64_t panel) {
        Outputs::put_totals(p, totals, row, end, panel);
    }

  private:
    static constexpr int ROWS = TileRegisters::ROWS, OUTPUTS = Outputs::COUNT, DEPTH = 32;
    static constexpr int64_t STEP = DEPTH * PANEL;                   // a panel's weights in one step
    static constexpr int64_t STRIDE = 2 * PANEL * sizeof(uint16_t);  // bytes between a tile's rows of weights
    static constexpr int64_t LINES = STEP / LINE_VALUES;
    static constexpr int64_t AHEAD = 3;  // prefetch distance for few rows, in steps
    using Tile = float[ROWS][OUTPUTS];
    using Sums = Tile[4];

    // Multiplies the inputs [k, k + count). weights(k, turn, turns) returns a step's weights; for many rows it is called
    // in several turns. Calls use(sums, row, n) for each 16 rows and 32 outputs, whose sums are two tiles.
    template <class Weights, class Use>
    void tiles(const Product& p, const Input* x, int64_t first, int64_t end, int64_t k, int64_t count,
               const Weights& weights, const Use& use) const {
        const int64_t K = p.in_features;
        const auto inputs = [&](int64_t row) {
            return end - row < ROWS && p.rows > ROWS ? last_rows.data() : x + (row - first) * K;
        };
        const int64_t whole = first + (end - first + ROWS - 1) / (2 * ROWS) * (2 * ROWS);  // end of the pairs of tiles
        const int64_t row_pairs = (whole - first) / (2 * ROWS), pairs = 2 * row_pairs;
        const auto row_of = [&](int64_t number) { return first + number % row_pairs * 2 * ROWS; };
        const auto part_of = [&](int64_t number) { return int(number / row_pairs) * PANEL / 2; };
        Sums sums[2];
        // Stored tiles can be read only late, so the next pair is multiplied first.
        const auto use_pair = [&](int64_t number) {
            for (int i = 0; i < 2; i++) use(&sums[number % 2][2 * i], row_of(number) + i * ROWS, part_of(number));
        };
        for (int64_t number = 0; number < pairs; number++) {  // all rows by one half of the panel, which stays in the L1 cache
            const int64_t row = row_of(number);
            two_by_two(inputs(row), inputs(row + ROWS), K, k, count, [&](int64_t at) {
                return weights(at, number, pairs) + 2 * part_of(number);
            });
            store(sums[number % 2]);
            if (number) use_pair(number - 1);
        }
        if (pairs) use_pair(pairs - 1);
        if (whole >= end) return;
        one_by_four(inputs(whole), K, k, count, [&](int64_t at) { return weights(at, 0, 1); });
        store(sums[0]);
        for (int i = 0; i < 4; i += 2) use(&sums[0][i], whole, i * OUTPUTS);
    }

    // Multiplies 16 rows by a panel's 64 outputs. Tile registers 0 to 3 hold the sums.
    template <class Weights>
    static void one_by_four(const Input* x, int64_t stride, int64_t begin, int64_t count, const Weights& weights) {
        clear();
        for (int64_t k = begin; k < begin + count; k += DEPTH) {
            const uint16_t* w = weights(k);
            _tile_loadd(4, x + k, stride * sizeof(Input));
            _tile_loadd(5, w, STRIDE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, w + 2 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, w + 4 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, w + 6 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(3, 4, 6);
        }
    }

    // Multiplies 32 rows, 16 in `upper` and 16 in `lower`, by 32 outputs.
    template <class Weights>
    static void two_by_two(
        const Input* upper, const Input* lower, int64_t stride, int64_t begin, int64_t count, const Weights& weights) {
        clear();
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

    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    static void store(Sums& sums) {
        constexpr int64_t BYTES = OUTPUTS * sizeof(float);
        _tile_stored(0, sums[0], BYTES);
        _tile_stored(1, sums[1], BYTES);
        _tile_stored(2, sums[2], BYTES);
        _tile_stored(3, sums[3], BYTES);
    }

    std::vector<Input> last_rows;  // inputs of an incomplete tile, followed by rows that are ignored
};

}  // namespace
