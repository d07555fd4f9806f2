// out[row][n] = sum over k of x[row][k] * w[n][k], plus bias[n]: bfloat16 in and out, float32 sums.
//
// The weights are packed in panels of 64 outputs: [n / 64][k / 2][64][2]. So a product reads them in one
// stream, as fast as the memory gives them, and a vector holds 16 (or 8) outputs' next two weights. Each output
// is summed by one thread over ascending k, whatever the number of rows and threads: a row's result has the same
// bits in every batch.

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "floats.h"
#include "product.h"
#if defined(__AVX512BF16__)
#include "pairs.h"
#endif

namespace {

constexpr int TILE_ROWS = 6;             // 6 x 4 sums and 4 weights fit into 32 registers
constexpr int64_t BLOCK_ROWS = 192;      // rows whose inputs stay in the cache while the panels pass
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// The rows [first, end) of one panel; `x` are the inputs of the first.
template <class Tiles>
void rows_of_panel(const Product& p, const typename Tiles::Input* x, int64_t first, int64_t end, int64_t panel) {
    int64_t row = first;
    const auto inputs = [&] { return x + (row - first) * p.in_features; };
    for (; row + TILE_ROWS <= end; row += TILE_ROWS) Tiles::template tile<TILE_ROWS>(p, inputs(), row, panel);
    switch (end - row) {
        case 1: return Tiles::template tile<1>(p, inputs(), row, panel);
        case 2: return Tiles::template tile<2>(p, inputs(), row, panel);
        case 3: return Tiles::template tile<3>(p, inputs(), row, panel);
        case 4: return Tiles::template tile<4>(p, inputs(), row, panel);
        case 5: return Tiles::template tile<5>(p, inputs(), row, panel);
    }
}

template <class Tiles> struct Job {
    const Product& product;
    int64_t panels, threads;
    std::atomic<int64_t> next_thread{0};

    void run() {
        thread_local Tiles tiles;
        const int64_t thread = next_thread++;
        const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
        for (int64_t row = 0; row < product.rows; row += BLOCK_ROWS) {
            const int64_t last = std::min(row + BLOCK_ROWS, product.rows);
            const auto* x = tiles.inputs(product, row, last);
            for (int64_t panel = begin; panel < end; panel++) rows_of_panel<Tiles>(product, x, row, last, panel);
        }
    }
};

template <class Tiles> void multiply(const Product& p, int64_t threads, Parallel parallel) {
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && p.rows * p.in_features * p.out_features >= SERIAL_WEIGHTS;
    Job<Tiles> job{p, panels, threads_pay ? std::min(threads, panels) : 1};
    if (job.threads <= 1) return job.run();
    parallel([](void* self) { static_cast<Job<Tiles>*>(self)->run(); }, &job, unsigned(job.threads), 0);
}

}  // namespace

extern "C" {

// By float32 products, on any CPU.
void tandem_linear_in_floats(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
    multiply<Floats>({x, weights, bias, out, rows, in_features, out_features}, threads, parallel);
}

// By what this CPU is fastest with.
void tandem_linear(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
#if defined(__AVX512BF16__)
    multiply<Pairs>({x, weights, bias, out, rows, in_features, out_features}, threads, parallel);
#else
    tandem_linear_in_floats(x, weights, bias, out, rows, in_features, out_features, threads, parallel);
#endif
}
}
