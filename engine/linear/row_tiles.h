// Splits rows into tiles whose number of rows is a compile-time constant.

#pragma once

#include <cstdint>
#include <utility>

namespace {

template <class Work, int... N>
void with_rows(int64_t rows, int64_t row, const Work& work, std::integer_sequence<int, N...>) {
    ((rows == N + 1 ? work(std::integral_constant<int, N + 1>{}, row) : void()), ...);
}

// Calls work(rows, row) for the fewest tiles of at most MOST rows that cover [first, end), of similar sizes; rows() is
// a constant.
template <int MOST, class Work> void in_tiles(int64_t first, int64_t end, const Work& work) {
    for (int64_t row = first, rows; row < end; row += rows) {
        const int64_t left = end - row, tiles = (left + MOST - 1) / MOST;
        rows = (left + tiles - 1) / tiles;
        with_rows(rows, row, work, std::make_integer_sequence<int, MOST>{});
    }
}

}  // namespace
