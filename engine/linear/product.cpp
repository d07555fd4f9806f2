// out[row][n] = sum over k of x[row][k] * w[n][k], plus bias[n]: bfloat16 in and out, float32 sums.
//
// The weights are packed in panels of 64 outputs: [n / 64][k / 2][64][2]. So a product reads them in one
// sequential stream, and a vector holds the next two weights of 16 (or 8) outputs. Each output is summed by one
// thread over ascending k, whatever the number of rows and threads: a row's result has the same bits in every batch.

#include <algorithm>
#include <cstdint>

#include "../../native/parallel.h"
#include "floats.h"
#include "product.h"
#if defined(__AVX512BF16__)
#include "pairs.h"
#if defined(__AMX_BF16__)
#include "matrix_tiles.h"
#endif
#endif

namespace {

constexpr int64_t BLOCK_ROWS = 192;  // rows whose inputs stay in the cache while all panels are read
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

template <class Tiles> void multiply(const Product& p, int64_t most_threads, Parallel parallel) {
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && p.rows * p.in_features * p.out_features >= SERIAL_WEIGHTS;
    const int64_t threads = threads_pay ? std::clamp<int64_t>(panels, 1, most_threads) : 1;
    on_threads(threads, parallel, [&](int64_t thread) {
        thread_local Tiles tiles;
        [[maybe_unused]] const typename Tiles::Registers registers;
        const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
        for (int64_t row = 0; row < p.rows; row += BLOCK_ROWS) {
            const int64_t last = std::min(row + BLOCK_ROWS, p.rows);
            const auto* x = tiles.inputs(p, row, last);
            for (int64_t panel = begin; panel < end; panel++) tiles.rows_of_panel(p, x, row, last, panel);
        }
    });
}

}  // namespace

extern "C" {

// With float32 products, on any CPU.
void tandem_linear_in_floats(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
    multiply<Floats>({x, weights, bias, out, rows, in_features, out_features}, threads, parallel);
}

#if defined(__AVX512BF16__)
// With products of bfloat16 pairs.
void tandem_linear_in_pairs(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
    multiply<Pairs>({x, weights, bias, out, rows, in_features, out_features}, threads, parallel);
}
#endif

// With the fastest kernel for this CPU.
void tandem_linear(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
    const Product product{x, weights, bias, out, rows, in_features, out_features};
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)
    if (MatrixTiles::can_multiply(product)) return multiply<MatrixTiles>(product, threads, parallel);
#endif
    multiply<Pairs>(product, threads, parallel);
#else
    multiply<Floats>(product, threads, parallel);
#endif
}
}
