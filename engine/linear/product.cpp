// out[row][n] = sum over k of x[row][k] * w[n][k], plus bias[n]: bfloat16 in and out, float32 sums.
//
// The weights are packed in panels of 64 outputs: [n / 64][k / 2][64][2]. So a product reads them in one
// stream, as fast as the memory gives them, and a vector holds 16 outputs' next two weights. Each output is
// summed by one thread over ascending k, whatever the number of rows and threads: a row's result has the same
// bits in every batch.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <immintrin.h>

namespace {

constexpr int LANES = 16, VECTORS = 4, PANEL = LANES * VECTORS;
constexpr int TILE_ROWS = 6;             // 6 x 4 sums and 4 weights fit into 32 registers
constexpr int64_t BLOCK_ROWS = 192;      // rows whose inputs stay in the cache while the panels pass
constexpr int64_t SERIAL_WEIGHTS = 1 << 15;

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Product {
    const uint16_t *x, *weights, *bias;
    uint16_t* out;
    int64_t rows, in_features, out_features;
};

inline __m512bh load(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline __m512 widen(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

template <int ROWS> void tile(const Product& p, int64_t row, int64_t panel) {
    const int64_t K = p.in_features, N = p.out_features;
    const uint16_t* x = p.x + row * K;
    const uint16_t* w = p.weights + panel * PANEL * K;
    __m512 sums[ROWS][VECTORS];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2, w += 2 * PANEL) {
        const __m512bh weights[VECTORS] = {load(w), load(w + 32), load(w + 64), load(w + 96)};
        for (int r = 0; r < ROWS; r++) {
            const auto inputs = (__m512bh)_mm512_set1_epi32(*(const int32_t*)(x + r * K + k));
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], weights[v], inputs);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        const int64_t n = panel * PANEL + v * LANES;
        const int64_t left = std::clamp<int64_t>(N - n, 0, LANES);
        const auto mask = __mmask16((1u << left) - 1);
        const __m512 bias = p.bias ? widen(_mm256_maskz_loadu_epi16(mask, p.bias + n)) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) {
            const __m512 sum = p.bias ? _mm512_add_ps(sums[r][v], bias) : sums[r][v];
            _mm256_mask_storeu_epi16(p.out + (row + r) * N + n, mask, (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

void rows_of_panel(const Product& p, int64_t first, int64_t end, int64_t panel) {
    int64_t row = first;
    for (; row + TILE_ROWS <= end; row += TILE_ROWS) tile<TILE_ROWS>(p, row, panel);
    switch (end - row) {
        case 1: return tile<1>(p, row, panel);
        case 2: return tile<2>(p, row, panel);
        case 3: return tile<3>(p, row, panel);
        case 4: return tile<4>(p, row, panel);
        case 5: return tile<5>(p, row, panel);
    }
}

struct Job {
    const Product& product;
    int64_t panels, threads;
    std::atomic<int64_t> next_thread{0};

    void run() {
        const int64_t thread = next_thread++;
        const int64_t begin = panels * thread / threads, end = panels * (thread + 1) / threads;
        for (int64_t row = 0; row < product.rows; row += BLOCK_ROWS)
            for (int64_t panel = begin; panel < end; panel++)
                rows_of_panel(product, row, std::min(row + BLOCK_ROWS, product.rows), panel);
    }
};

}  // namespace

extern "C" void tandem_linear(
    const uint16_t* x, const uint16_t* weights, const uint16_t* bias, uint16_t* out, int64_t rows,
    int64_t in_features, int64_t out_features, int64_t threads, Parallel parallel) {
    const Product p{x, weights, bias, out, rows, in_features, out_features};
    const int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    const bool threads_pay = parallel && rows * in_features * out_features >= SERIAL_WEIGHTS;
    Job job{p, panels, threads_pay ? std::min(threads, panels) : 1};
    if (job.threads <= 1) return job.run();
    parallel([](void* self) { static_cast<Job*>(self)->run(); }, &job, unsigned(job.threads), 0);
}
