// How a product is shared out: each thread computes some panels, whatever the number of rows.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../native/parallel.h"
#include "product.h"

namespace {

constexpr int64_t BLOCK_ROWS = 192;  // rows whose inputs stay in the cache while all panels are read
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

// Calls work(tiles, begin, end) on each thread, for its panels.
template <class Tiles, class Work>
void each_share(const Product& p, int64_t most_threads, Parallel parallel, const Work& work) {
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && p.rows * p.in_features * p.out_features >= SERIAL_WEIGHTS;
    const int64_t threads = threads_pay ? std::clamp<int64_t>(panels, 1, most_threads) : 1;
    on_threads(threads, parallel, [&](int64_t thread) {
        thread_local Tiles tiles;
        [[maybe_unused]] const typename Tiles::Registers registers(p);
        work(tiles, panels * thread / threads, panels * (thread + 1) / threads);
    });
}

}  // namespace
