// AMX's tile registers: the permission to use them, and their shapes.
#pragma once

#include <atomic>
#include <cstdint>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Orders memory accesses before tile loads, which the compiler does not see.
inline void tiles_will_load() { std::atomic_signal_fence(std::memory_order_release); }

// A thread's tile registers, released at the end. A register has up to 16 rows of 64 bytes: 0 to 3 are for sums, 4 (and
// for 16 rows 7) for first factors, 5 and 6 for second ones; or 7 for sums of 16 rows with first factors in 5.
class TileRegisters {
  public:
    static constexpr int ROWS = 16;

    static bool are_granted() {
        static const bool granted = ask();
        return granted;
    }

    // Gives tiles 0 to 4 this number of rows, and the others 16. Unless they have it already, all tiles become zero.
    void shape(int rows) {
        if (rows == shaped) return;
        shaped = rows;
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
        } shapes;
        for (const int tile : {0, 1, 2, 3, 4}) shapes.rows[tile] = uint8_t(rows);
        tiles_will_load();
        _tile_loadconfig(&shapes);
    }

    ~TileRegisters() {
        if (shaped) _tile_release();
    }

  private:
    // Asks Linux for the registers (ARCH_REQ_XCOMP_PERM), which a process may not use otherwise.
    static bool ask() {
        constexpr int REQUEST = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }

    int shaped = 0;
};

// Sets sums 0 to COUNT - 1 to zero.
template <int COUNT>
inline void clear_sums() {
    _tile_zero(0);
    if constexpr (COUNT > 1) _tile_zero(1);
    if constexpr (COUNT > 2) _tile_zero(2);
    if constexpr (COUNT > 3) _tile_zero(3);
}

// Loads sums 0 to COUNT - 1, whose first rows lie `apart` floats from each other, and their rows `row_bytes` bytes.
template <int COUNT>
inline void load_sums(const float* from, int64_t apart, int64_t row_bytes) {
    tiles_will_load();
    _tile_loadd(0, from, row_bytes);
    if constexpr (COUNT > 1) _tile_loadd(1, from + apart, row_bytes);
    if constexpr (COUNT > 2) _tile_loadd(2, from + 2 * apart, row_bytes);
    if constexpr (COUNT > 3) _tile_loadd(3, from + 3 * apart, row_bytes);
}

// Stores them likewise.
template <int COUNT>
inline void store_sums(float* to, int64_t apart, int64_t row_bytes) {
    _tile_stored(0, to, row_bytes);
    if constexpr (COUNT > 1) _tile_stored(1, to + apart, row_bytes);
    if constexpr (COUNT > 2) _tile_stored(2, to + 2 * apart, row_bytes);
    if constexpr (COUNT > 3) _tile_stored(3, to + 3 * apart, row_bytes);
}

// Adds the product of a tile of first factors with each of COLUMNS tiles of second ones, which are beside each other, to
// sums 0 to COLUMNS - 1. `a` and `b` point to their first rows, which lie this number of bytes apart.
template <int COLUMNS>
inline void multiply_tiles(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
    const auto column = [&](int index) { return static_cast<const char*>(b) + 64 * index; };
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(5, column(0), b_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (COLUMNS > 1) {
        _tile_loadd(6, column(1), b_bytes);
        _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (COLUMNS > 2) {
        _tile_loadd(5, column(2), b_bytes);
        _tile_dpbf16ps(2, 4, 5);
    }
    if constexpr (COLUMNS > 3) {
        _tile_loadd(6, column(3), b_bytes);
        _tile_dpbf16ps(3, 4, 6);
    }
}

// Loads a tile of first factors, whose rows lie `row_bytes` bytes apart.
inline void load_rows(const void* from, int64_t row_bytes) { _tile_loadd(4, from, row_bytes); }

// Adds the product of the loaded first factors with a tile of second ones to sum SUM.
template <int SUM>
inline void add_product(const void* from, int64_t row_bytes) {
    if constexpr (SUM % 2) _tile_loadd(6, from, row_bytes);
    else _tile_loadd(5, from, row_bytes);
    if constexpr (SUM == 0) _tile_dpbf16ps(0, 4, 5);
    if constexpr (SUM == 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (SUM == 2) _tile_dpbf16ps(2, 4, 5);
    if constexpr (SUM == 3) _tile_dpbf16ps(3, 4, 6);
}

// Stores sum SUM, and sets it to zero.
template <int SUM>
inline void take_sum(float* to, int64_t row_bytes) {
    if constexpr (SUM == 0) {
        _tile_stored(0, to, row_bytes);
        _tile_zero(0);
    }
    if constexpr (SUM == 1) {
        _tile_stored(1, to, row_bytes);
        _tile_zero(1);
    }
    if constexpr (SUM == 2) {
        _tile_stored(2, to, row_bytes);
        _tile_zero(2);
    }
    if constexpr (SUM == 3) {
        _tile_stored(3, to, row_bytes);
        _tile_zero(3);
    }
}

// The same for 16 rows, whatever the shape, by 16 columns: register 7 has the sums.
inline void clear_sixteen() { _tile_zero(7); }
inline void store_sixteen(float* to, int64_t row_bytes) { _tile_stored(7, to, row_bytes); }
inline void multiply_sixteen(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
    _tile_loadd(5, a, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(7, 5, 6);
}

}  // namespace
