// Tiles for AMX-BF16: one instruction multiplies 16 rows by the next 32 weights of 16 outputs, and the panels have the
// layout that it reads. Fewer rows are computed as 16, which takes no longer than loading the weights.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "outputs.h"
#include "product.h"

namespace {

class MatrixTiles {
  public:
    using Input = uint16_t;

    // While this object lives, the thread's tile registers are configured as 16 rows of 64 bytes.
    struct Registers {
        Registers() {
            alignas(64) static const struct {
                uint8_t palette = 1, start_row = 0, reserved[14] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
            } shape;
            _tile_loadconfig(&shape);
        }
        ~Registers() { _tile_release(); }
    };

    static bool can_multiply(const Product& p) {
        static const bool granted = ask_for_registers();
        return granted && p.in_features % DEPTH == 0;
    }

    // The inputs of rows [row, end); valid until the next call.
    const Input* inputs(const Product& p, int64_t row, int64_t end) {
        const int64_t K = p.in_features, left = (end - row) % ROWS;
        if (left) {
            last_rows.resize(ROWS * K);
            memcpy(last_rows.data(), p.x + (end - left) * K, left * K * sizeof(Input));
        }
        std::atomic_signal_fence(std::memory_order_release);  // the compiler doesn't know that tiles load from here
        return p.x + row * K;
    }

    // The rows [first, end) of one panel; `x` are the inputs of the first.
    void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) const {
        const auto inputs = [&](int64_t row) {
            return end - row < ROWS ? last_rows.data() : x + (row - first) * p.in_features;
        };
        int64_t row = first;
        for (; row + ROWS < end; row += 2 * ROWS) {
            two_by_two(p, inputs(row), inputs(row + ROWS), row, end, panel * PANEL, 0);
            two_by_two(p, inputs(row), inputs(row + ROWS), row, end, panel * PANEL, PANEL / 2);
        }
        if (row < end) one_by_four(p, inputs(row), row, end, panel * PANEL);
    }

  private:
    static constexpr int ROWS = 16, OUTPUTS = Outputs::COUNT, DEPTH = 32;
    static constexpr int64_t STEP = DEPTH * PANEL;                   // weights of a panel in one step
    static constexpr int64_t STRIDE = 2 * PANEL * sizeof(uint16_t);  // bytes between a tile's rows of weights
    static constexpr int64_t AHEAD = 3;                              // steps that weights are prefetched ahead
    using Sums = float[4][ROWS][OUTPUTS];

    // A process has to ask Linux for the use of AMX registers (ARCH_REQ_XCOMP_PERM).
    static bool ask_for_registers() {
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }

    // 16 rows and a panel's 64 outputs. Registers are numbered: 0 to 3 are sums.
    static void one_by_four(const Product& p, const Input* x, int64_t row, int64_t end, int64_t first) {
        const int64_t K = p.in_features;
        const uint16_t* w = p.weights + first * K;
        clear();
        for (int64_t k = 0; k < K; k += DEPTH, w += STEP) {
            prefetch(w);
            _tile_loadd(4, x + k, K * sizeof(Input));
            _tile_loadd(5, w, STRIDE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, w + 2 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, w + 4 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, w + 6 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(3, 4, 6);
        }
        Sums sums;
        store(sums);
        for (int i = 0; i < 4; i++) put(p, sums[i], row, end, first + i * OUTPUTS);
    }

    // 32 rows, the upper and the lower 16, and a panel's 32 outputs from `part` on.
    static void two_by_two(
        const Product& p, const Input* upper, const Input* lower, int64_t row, int64_t end, int64_t first, int part) {
        const int64_t K = p.in_features;
        const uint16_t* w = p.weights + first * K + 2 * part;
        clear();
        for (int64_t k = 0; k < K; k += DEPTH, w += STEP) {
            if (part == 0) prefetch(w);
            _tile_loadd(4, upper + k, K * sizeof(Input));
            _tile_loadd(5, w, STRIDE);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, w + 2 * OUTPUTS, STRIDE);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, lower + k, K * sizeof(Input));
            _tile_dpbf16ps(2, 7, 5);
            _tile_dpbf16ps(3, 7, 6);
        }
        Sums sums;
        store(sums);
        for (int i = 0; i < 4; i++) put(p, sums[i], row + i / 2 * ROWS, end, first + part + i % 2 * OUTPUTS);
    }

    static void prefetch(const uint16_t* w) {
        for (int64_t i = 0; i < STEP; i += 32) __builtin_prefetch(w + AHEAD * STEP + i);
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

    static void put(const Product& p, const float (*sums)[OUTPUTS], int64_t row, int64_t end, int64_t n) {
        const Outputs outputs(p, n);
        for (int r = 0; r < std::min<int64_t>(end - row, ROWS); r++) outputs.put(row + r, _mm512_loadu_ps(sums[r]));
    }

    std::vector<Input> last_rows;  // those of an incomplete tile; what follows them is ignored
};

}  // namespace
