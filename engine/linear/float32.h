// Tiles in float32, with float32 weights.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../devices/cpu/attention/simd.h"
#include "product.h"
#include "row_tiles.h"

namespace {

class Float32 {
  public:
    using Input = float;
    struct Registers {
        explicit Registers(const ProductOf<float>&) {}
    };

    const Input* inputs(const ProductOf<float>& p, int64_t row, int64_t) { return p.x + row * p.in_features; }

    // Computes rows [first, end) of one panel; `x` has the inputs from row `first` on.
    static void rows_of_panel(const ProductOf<float>& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        in_tiles<6>(first, end, [&](auto rows, int64_t row) {
            tile<rows()>(p, x + (row - first) * p.in_features, row, panel);
        });
    }

  private:
    // See floats.h.
    template <int ROWS> static constexpr int VECTORS = LANES == 16 ? 4 : ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
    template <int ROWS> static constexpr int WIDTH = VECTORS<ROWS> * LANES;
    template <int ROWS> static constexpr int64_t RUN = WIDTH<ROWS> == PANEL ? 1 << 30 : 64;  // its weights stay in the first cache
    static constexpr int64_t FETCHED = 3072;  // prefetch distance, in weights
    static constexpr int64_t LINE = 16;       // floats of a cache line

    // If the vectors hold only a part of a panel's outputs, the parts take turns, so memory is read in its order.
    template <int ROWS> static void tile(const ProductOf<float>& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features;
        float totals[ROWS][PANEL] = {};
        for (int64_t k = 0; k < K; k += RUN<ROWS>) {
            const int64_t count = std::min(RUN<ROWS>, K - k);
            for (int part = 0; part < PANEL; part += WIDTH<ROWS>)
                add_products<ROWS>(p.weights + (panel * K + k) * PANEL + part, x + k, K, count, totals, part);
        }
        put(p, totals[0], row, row + ROWS, panel);
    }

    // Adds the products of `count` weights of WIDTH outputs with each row's inputs; rows have stride `stride`.
    template <int ROWS> static void add_products(
        const float* w, const Input* x, int64_t stride, int64_t count, float (&totals)[ROWS][PANEL], int part) {
        Vec sums[ROWS][VECTORS<ROWS>];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS<ROWS>; v++) sums[r][v] = load(totals[r] + part + v * LANES);
        for (int64_t k = 0; k < count; k++, w += PANEL) {
            for (int i = 0; i < WIDTH<ROWS>; i += LINE) __builtin_prefetch(w + FETCHED + i);
            Vec weights[VECTORS<ROWS>];
            for (int v = 0; v < VECTORS<ROWS>; v++) weights[v] = load(w + v * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS<ROWS>; v++) sums[r][v] += weights[v] * x[r * stride + k];
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS<ROWS>; v++) store(totals[r] + part + v * LANES, sums[r][v]);
    }

    // Writes the outputs of rows [row, end); `totals` begin at row `row`.
    static void put(const ProductOf<float>& p, const float* totals, int64_t row, int64_t end, int64_t panel) {
        const int64_t first = panel * PANEL, count = std::min<int64_t>(p.out_features - first, PANEL);
        for (; row < end; row++, totals += PANEL) {
            float* out = p.out + row * p.out_features + first;
            for (int64_t n = 0; n < count; n++) out[n] = p.bias ? totals[n] + p.bias[first + n] : totals[n];
        }
    }
};

}  // namespace
