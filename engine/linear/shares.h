// Splits a product among threads by panels of outputs and blocks of rows.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../native/parallel.h"
#include "product.h"

namespace {

constexpr int64_t BLOCK_ROWS = 512;  // the most rows that one thread multiplies by a panel at once
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

// Returns the number of rows whose inputs stay in the L2 cache while all panels are read. Fewer read the weights more
// often. CPUs with AMX have at least 2 MB of it.
inline int64_t rows_in_cache([[maybe_unused]] int64_t row_bytes) {
#if defined(__AMX_BF16__)
    return std::clamp<int64_t>((1 << 20) / row_bytes / 32 * 32, 96, BLOCK_ROWS);
#else
    return 192;
#endif
}

// Calls work(tiles, inputs, row, end, panel) for all panels and blocks of rows, on up to `most_threads` threads.
template <class Tiles, class Value, class Work>
void each_panel(const ProductOf<Value>& p, int64_t most_threads, Parallel parallel, const Work& work) {
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && p.rows * p.in_features * p.out_features >= SERIAL_WEIGHTS;
    const int64_t threads = threads_pay ? std::clamp<int64_t>(panels, 1, most_threads) : 1;
    const int64_t block = rows_in_cache(p.in_features * sizeof(Value));
    Ranges ranges((p.rows + block - 1) / block * panels, threads);
    on_threads(threads, parallel, [&](int64_t) {
        thread_local Tiles tiles;
        [[maybe_unused]] const typename Tiles::Registers registers(p);
        const typename Tiles::Input* inputs = nullptr;
        int64_t prepared = -1;
        for (int64_t begin, end; ranges.take(begin, end);) {
            for (; begin < end; begin++) {
                const int64_t row = begin / panels * block, last = std::min(row + block, p.rows);
                if (row != prepared) inputs = tiles.inputs(p, prepared = row, last);
                work(tiles, inputs, row, last, begin % panels);
            }
        }
    });
}

}  // namespace
