// Tiles for AVX512-BF16, which multiplies pairs of bfloat16, so inputs need no conversion. For few rows, quantized
// weights are expanded in registers, by units of the CPU that multiplication leaves idle.

#pragma once

#include <algorithm>
#include <cstdint>
#include <immintrin.h>

#include "codes.h"
#include "outputs.h"
#include "product.h"
#include "row_tiles.h"

namespace {

class Pairs {
  public:
    using Input = uint16_t;
    using Int4Codes = Int4;
    static constexpr bool EXPANDS = true, ROUNDS = false;
    static constexpr int64_t FEW_ROWS = 48;  // for more rows, expanding a whole panel first is faster
    static constexpr int64_t LONGEST_RUN = 128;
    struct Registers {
        explicit Registers(const Product&) {}
    };

    const Input* inputs(const Product& p, int64_t row, int64_t) { return p.x + row * p.in_features; }

    // Computes rows [first, end) of one panel; `x` has the inputs from row `first` on.
    static void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        in_tiles<6>(first, end, [&](auto rows, int64_t row) {
            tile<rows()>(p, x + (row - first) * p.in_features, row, panel);
        });
    }

    // Computes the same rows of a panel of quantized weights. 24 of 32 registers hold sums. Many rows take half a panel
    // at a time, to use each weight expanded here more often. For weights expanded before, 12 hold sums and 12 totals.
    template <class Codes> static void rows_of_codes(
        const Product& p, const Coded& w, const Input* x, int64_t first, int64_t end, int64_t panel) {
        constexpr bool EXPANDED = Codes::CODES == 1;
        in_tiles<EXPANDED ? 6 : 12>(first, end, [&](auto rows, int64_t row) {
            constexpr int VECTORS = !EXPANDED && rows() <= 6 ? ALL_VECTORS : ALL_VECTORS / 2;
            tile_of_codes<Codes, rows(), VECTORS>(p, w, x + (row - first) * p.in_features, row, panel);
        });
    }

  private:
    static constexpr int ALL_VECTORS = PANEL / Outputs::COUNT;
    static constexpr int64_t AHEAD = 1 << 11;  // prefetch distance of codes, in words: 4 KiB

    template <int ROWS, int VECTORS> using Sums = __m512[ROWS][VECTORS];

    template <int ROWS> static void tile(const Product& p, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features;
        Sums<ROWS, ALL_VECTORS> sums;
        multiply<Plain>(p.weights + panel * PANEL * K, 0, x, K, K, sums);
        put(p, sums, row, panel, 0);
    }

    template <class Codes, int ROWS, int VECTORS>
    static void tile_of_codes(const Product& p, const Coded& w, const Input* x, int64_t row, int64_t panel) {
        const int64_t K = p.in_features;
        for (int v = 0; v < ALL_VECTORS; v += VECTORS) {
            Sums<ROWS, VECTORS> totals = {}, sums;
            for (int64_t i = 0, k = 0; k < K; i++, k += w.run) {
                multiply<Codes>(w.words + k * (PANEL / Codes::CODES), v, x + k, K, std::min(w.run, K - k), sums);
                scale(w, k / w.group * PANEL + v * Outputs::COUNT, w.input_sums + row * w.runs + i, sums, totals);
            }
            put(p, totals, row, panel, v);
        }
    }

    // Sums over `count` inputs of each row, with stride `stride`, for the panel's outputs from vector `v` on.
    template <class Codes, int ROWS, int VECTORS> static void multiply(
        const uint16_t* words, int v, const Input* x, int64_t stride, int64_t count, Sums<ROWS, VECTORS>& sums) {
        for (auto& of_row : sums)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
        words += v * LINE_VALUES;
        for (int64_t k = 0; k < count; k += 2 * Codes::CODES, words += WORDS) {
            for (int i = 0; Codes::CODES > 1 && i < VECTORS; i++) __builtin_prefetch(words + AHEAD + i * LINE_VALUES);
            each_code<Codes>([&](auto code) {
                __m512bh weights[VECTORS];
                for (int i = 0; i < VECTORS; i++) weights[i] = (__m512bh)values<Codes, code()>(words + i * LINE_VALUES);
                for (int r = 0; r < ROWS; r++) {
                    const auto inputs = (__m512bh)_mm512_set1_epi32(*(const int32_t*)(x + r * stride + k + 2 * code()));
                    for (int i = 0; i < VECTORS; i++) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], weights[i], inputs);
                }
            });
        }
    }

    template <int ROWS, int VECTORS> static void scale(
        const Coded& w, int64_t first, const float* input_sums, const Sums<ROWS, VECTORS>& sums, Sums<ROWS, VECTORS>& totals) {
        for (int i = 0; i < VECTORS; i++) {
            const int64_t n = first + i * Outputs::COUNT;
            const auto factors = (__m512)w.scales.factors(n);
            const auto offsets = w.scales.have_offsets() ? (__m512)w.scales.offsets(n) : _mm512_setzero_ps();
            for (int r = 0; r < ROWS; r++) {
                totals[r][i] = _mm512_fmadd_ps(sums[r][i], factors, totals[r][i]);
                if (w.scales.have_offsets())
                    totals[r][i] = _mm512_fmadd_ps(_mm512_set1_ps(input_sums[r * w.runs]), offsets, totals[r][i]);
            }
        }
    }

    template <int ROWS, int VECTORS>
    static void put(const Product& p, const Sums<ROWS, VECTORS>& sums, int64_t row, int64_t panel, int v) {
        for (int i = 0; i < VECTORS; i++) {
            const Outputs outputs(p, panel * PANEL + (v + i) * Outputs::COUNT);
            for (int r = 0; r < ROWS; r++) outputs.put(row + r, sums[r][i]);
        }
    }
};

}  // namespace
