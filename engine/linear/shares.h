// Splits a product among threads by panels of outputs and blocks of rows.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../native/parallel.h"
#include "product.h"

namespace {

constexpr int64_t BLOCK_ROWS = 192;  // rows whose inputs stay in the cache while all panels are read
#if defined(__AMX_BF16__)
constexpr int64_t BLOCK_BYTES = 1 << 19;  // such CPUs have 2 MiB, and multiply faster than weights arrive
#else
constexpr int64_t BLOCK_BYTES = 0;
#endif
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

// Calls work(tiles, inputs, row, end, panel) for all panels and blocks of rows, on up to `most_threads` threads.
template <class Tiles, class Value, class Work>
void each_panel(const ProductOf<Value>& p, int64_t most_threads, Parallel parallel, const Work& work) {
    const int64_t in_bytes = BLOCK_BYTES / int64_t(sizeof(Value)) / p.in_features / 32 * 32;
    const int64_t block_rows = std::max(BLOCK_ROWS, in_bytes);
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && p.rows * p.in_features * p.out_features >= SERIAL_WEIGHTS;
    const int64_t threads = threads_pay ? std::clamp<int64_t>(panels, 1, most_threads) : 1;
    Ranges ranges((p.rows + block_rows - 1) / block_rows * panels, threads);
    on_threads(threads, parallel, [&](int64_t) {
        thread_local Tiles tiles;
        [[maybe_unused]] const typename Tiles::Registers registers(p);
        const typename Tiles::Input* inputs = nullptr;
        int64_t prepared = -1;
        for (int64_t begin, end; ranges.take(begin, end);) {
            for (; begin < end; begin++) {
                const int64_t row = begin / panels * block_rows, last = std::min(row + block_rows, p.rows);
                if (row != prepared) inputs = tiles.inputs(p, prepared = row, last);
                work(tiles, inputs, row, last, begin % panels);
            }
        }
    });
}

}  // namespace
