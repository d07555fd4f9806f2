// Tiles for AMX-BF16: one instruction multiplies 16 rows by the next 32 weights of 16 outputs, read in the panels'
// layout. Fewer rows are computed as 16, which takes no longer than loading the weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <memory>
#include <utility>
#include <vector>

#include "../../native/cache_lines.h"
#include "../../native/tile_registers.h"
#include "codes.h"
#include "one_row.h"
#include "outputs.h"
#include "product.h"
#include "shares.h"

namespace {

class MatrixTiles {
  public:
    using Input = uint16_t;
    using Int4Codes = Int4Above16;
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

    // Computes the same rows with quantized weights. For few rows the weights for the next DEPTH inputs are expanded
    // while those before are multiplied; for more, the whole panel's first.
    template <class Codes>
    void rows_of_runs(const Product& p, const Coded& w, const Input* x, int64_t first, int64_t end, int64_t panel) {
        if (end - first == 1) return one_row.panel_of_codes<Codes>(p, w, first, panel);
        const int64_t K = p.in_features, steps = K / DEPTH;
        const auto expand_into = [&](Weights& to, int64_t step, int column) {
            expand_tile<Codes>(w.words + step * STEP / Codes::CODES + column * 2 * OUTPUTS, to[column][0]);
        };
        if (end - first <= FEW_ROWS) {
            auto& expanded = buffers->expanded;
            for (int column = 0; column < 4; column++) expand_into(expanded[0], 0, column);
            const Input* rows = inputs(p, x, first, first, end);
            return add_runs<4>(*buffers, p, w, first, end, panel, 0, [&](int64_t step, auto tile) {
                multiply_column<tile()>(rows + step * DEPTH, K, expanded[step % 2]);
                if (step + 1 < steps) expand_into(expanded[(step + 1) % 2], step + 1, tile());
            });
        }
        const auto weights = (Weights*)at_page(panel_weights, K * PANEL);
        for (int64_t step = 0; step < steps; step++)
            for (int column = 0; column < 4; column++) expand_into(weights[step], step, column);
        const int64_t pairs_end = end_of_pairs(first, end);
        for (int64_t row = first; row < pairs_end; row += 2 * ROWS) {
            const Input *upper = inputs(p, x, first, row, end), *lower = inputs(p, x, first, row + ROWS, end);
            for (int column = 0; column < 4; column += 2)
                add_runs<2>(*buffers, p, w, row, end, panel, column * OUTPUTS, [&](int64_t step, auto tile) {
                    const Input* rows = tile() < 2 ? upper : lower;
                    multiply_pair<tile()>(rows + step * DEPTH, K, weights[step] + column);
                });
        }
        if (pairs_end == end) return;
        const Input* rows = inputs(p, x, first, pairs_end, end);
        add_runs<4>(*buffers, p, w, pairs_end, end, panel, 0, [&](int64_t step, auto tile) {
            multiply_column<tile()>(rows + step * DEPTH, K, weights[step]);
        });
    }

  private:
    static constexpr int ROWS = TileRegisters::ROWS, OUTPUTS = Outputs::COUNT;
    static constexpr int64_t STEP = DEPTH * PANEL;                   // a panel's weights in one step
    static constexpr int64_t STRIDE = 2 * PANEL * sizeof(uint16_t);  // bytes between a tile's rows of weights
    static constexpr int64_t LINES = STEP / LINE_VALUES;
    static constexpr int64_t L1_INPUTS = 192;  // a panel's weights for these take 24 KB
    static constexpr int64_t AHEAD = 3;  // prefetch distance for few rows, in steps
    static constexpr size_t PAGE = 4096;
    using Tile = float[ROWS][OUTPUTS];
    using Sums = Tile[4];
    using WeightTile = uint16_t[DEPTH / 2][2 * OUTPUTS];
    using Weights = WeightTile[PANEL / OUTPUTS];  // a panel's weights for DEPTH inputs

    // Sums and weights of the four tiles. A load waits for an earlier store that has the same offset within its page,
    // even of another page. So each member is a page, in which a tile's part has the same offset as in the others:
    // while a tile is at work, the last stores were to other tiles' parts.
    struct alignas(PAGE) Buffers {
        Sums totals, stored[2];
        Weights expanded[2];
    };

    template <class Job> [[gnu::always_inline]] static inline void each_tile(const Job& job) {
        each_of(job, std::make_integer_sequence<int, 4>{});
    }

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
        return std::min(first + (end - first + ROWS - 1) / (2 * ROWS) * (2 * ROWS), end);
    }

    // Returns room for `count` values from the begin of a page on.
    static uint16_t* at_page(AlignedVector<uint16_t>& room, int64_t count) {
        room.resize(count + PAGE / sizeof(uint16_t));
        return (uint16_t*)(((uintptr_t)room.data() + PAGE - 1) / PAGE * PAGE);
    }

    const Input* inputs(const Product& p, const Input* x, int64_t first, int64_t row, int64_t end) const {
        return end - row < ROWS && p.rows > ROWS ? last_rows.data() : x + (row - first) * p.in_features;
    }

    // Multiplies run by run, and adds up the scaled sums of four tiles, COLUMNS of them beside each other from output
    // `n` of the panel on. multiply(step, tile) adds to a tile's sums; it is called for each tile in each step. A
    // stored tile can be read only late, so a run's sums are stored while the next run is multiplied, and added to the
    // totals while the one after that is.
    template <int COLUMNS, class Multiply>
    static void add_runs(Buffers& b, const Product& p, const Coded& w, int64_t row, int64_t end, int64_t panel, int n,
                         const Multiply& multiply) {
        for (auto& totals : b.totals) memset(totals, 0, std::min<int64_t>(end - row, ROWS) * sizeof *totals);
        clear();
        int64_t step = 0;
        for (int64_t run = 0; run < w.runs; run++)
            for (const int64_t begin = step; step < begin + w.run / DEPTH; step++)
                each_tile([&](auto tile) {
                    if (step == begin && run > 1) add_run<COLUMNS>(b, w, run - 2, row, end, n, tile());
                    if (step == begin && run) take_sum<tile()>(b.stored[(run - 1) % 2][tile()][0], sizeof **b.totals);
                    multiply(step, tile);
                });
        each_tile([&](auto tile) {
            if (w.runs > 1) add_run<COLUMNS>(b, w, w.runs - 2, row, end, n, tile());
            take_sum<tile()>(b.stored[(w.runs - 1) % 2][tile()][0], sizeof **b.totals);
        });
        for (int tile = 0; tile < 4; tile++) add_run<COLUMNS>(b, w, w.runs - 1, row, end, n, tile);
        put<COLUMNS>(p, b.totals, row, end, panel * PANEL + n);
    }

    // Adds a run's scaled sums of a tile. A run is a group here. Inlined: a call clears the vector registers.
    template <int COLUMNS>
    [[gnu::always_inline]] static inline void add_run(
        Buffers& b, const Coded& w, int64_t run, int64_t row, int64_t end, int n, int tile) {
        const int64_t from = row + tile / COLUMNS * ROWS, rows = std::min<int64_t>(end - from, ROWS);
        const int64_t scale = run * PANEL + n + tile % COLUMNS * OUTPUTS;
        const auto factors = (__m512)w.scales.factors(scale);
        const auto offsets = w.scales.have_offsets() ? (__m512)w.scales.offsets(scale) : _mm512_setzero_ps();
        const Tile& sums = b.stored[run % 2][tile];
        Tile& totals = b.totals[tile];
        const float* input_sum = w.input_sums + from * w.runs + run;
        const auto add = [&, have_offsets = w.scales.have_offsets(), runs = w.runs](int64_t r) {
            __m512 total = _mm512_fmadd_ps(_mm512_loadu_ps(sums[r]), factors, _mm512_loadu_ps(totals[r]));
            if (have_offsets) total = _mm512_fmadd_ps(_mm512_set1_ps(input_sum[r * runs]), offsets, total);
            _mm512_storeu_ps(totals[r], total);
        };
        if (rows == ROWS) {
#pragma GCC unroll 16
            for (int64_t r = 0; r < ROWS; r++) add(r);
        } else {
            for (int64_t r = 0; r < rows; r++) add(r);
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

    // Multiplies a tile of rows by tile COLUMN of `weights`, after the tiles before it.
    template <int COLUMN> static void multiply_column(const Input* x, int64_t stride, const WeightTile* weights) {
        if (!COLUMN) load_rows(x, stride * sizeof(Input));
        tiles_will_load();
        add_product<COLUMN>(weights[COLUMN], sizeof *weights[COLUMN]);
    }

    // Multiplies two tiles of rows by two of weights: first the upper rows (TILE is 0 or 1), then the lower (2 or 3).
    template <int TILE> static void multiply_pair(const Input* x, int64_t stride, const WeightTile* weights) {
        if constexpr (TILE < 2) {
            multiply_column<TILE>(x, stride, weights);
        } else if constexpr (TILE == 2) {
            _tile_loadd(7, x, stride * sizeof(Input));
            _tile_dpbf16ps(2, 7, 5);
        } else {
            _tile_dpbf16ps(3, 7, 6);
        }
    }

    static void clear() { clear_sums<4>(); }
    static void load(const Sums& sums) { load_sums<4>(sums[0][0], ROWS * OUTPUTS, OUTPUTS * sizeof(float)); }
    static void store(Sums& sums) { store_sums<4>(sums[0][0], ROWS * OUTPUTS, OUTPUTS * sizeof(float)); }

    alignas(64) Sums sums[BLOCK_ROWS / ROWS];
    const std::unique_ptr<Buffers> buffers = std::make_unique<Buffers>();
    AlignedVector<uint16_t> panel_weights;
    OneRow one_row;
    std::vector<Input> last_rows;  // inputs of an incomplete tile, followed by rows that are ignored
};

}  // namespace
