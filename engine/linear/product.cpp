// out[row][n] = sum over k of x[row][k] * w[n][k], plus bias[n]: bfloat16 or float32 in and out, float32 sums.
//
// The weights are packed in panels of 64 outputs: [n / 64][k / 2][64][2]. So a product reads them in one sequential
// stream, and a vector holds the next two weights of 16 (or 8) outputs. Panels of float32 are [n / 64][k][64]. One
// thread sums each output over ascending k, for any number of rows and threads, so a row's result has the same bits in
// every batch.

#include <algorithm>
#include <cstdint>

#include "floats.h"
#include "product.h"
#include "quantized.h"
#include "routed.h"
#if defined(__AVX512BF16__)
#include "pairs.h"
#if defined(__AMX_BF16__)
#include "matrix_tiles.h"
#endif
#endif

namespace {

#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
using Integers = Bytes;
#else
using Integers = Shorts;
#endif

template <class Tiles, class Value> void multiply(const ProductOf<Value>& p, int64_t most_threads, Parallel parallel) {
    each_panel<Tiles>(p, most_threads, parallel, [&](auto& tiles, const auto* inputs, int64_t row, int64_t end, int64_t panel) {
        tiles.rows_of_panel(p, inputs, row, end, panel);
    });
}

}  // namespace

extern "C" {

// Multiplies with the fastest kernel for this CPU.
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

// Multiplies float32 weights and inputs, on any CPU.
void tandem_linear_of_float32(
    const float* x, const float* weights, const float* bias, float* out, int64_t rows, int64_t in_features,
    int64_t out_features, int64_t threads, Parallel parallel) {
    multiply<FloatTiles<float>>(ProductOf<float>{x, weights, bias, out, rows, in_features, out_features}, threads, parallel);
}

// Writes some outputs' weights, rounded to bfloat16. They must be INT8 codes without minima and in the inputs' order.
void tandem_quantized_rows(const Quantized* weights, const int64_t* outputs, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; i++, out += weights->in_features) write_row(*weights, outputs[i], out);
}

// Multiplies with the fastest kernel for this CPU. The weights' inputs must be whole runs of at least 32.
void tandem_quantized_linear(
    const uint16_t* x, const Quantized* weights, uint16_t* out, int64_t rows, int64_t threads, Parallel parallel) {
    if (weights->input_group) return multiply_rounded<Integers>(x, *weights, out, rows, threads, parallel);
#if defined(__AVX512BF16__)
#if defined(__AMX_BF16__)
    if (MatrixTiles::can_multiply({nullptr, nullptr, nullptr, nullptr, rows, weights->in_features, weights->out_features}))
        return multiply<MatrixTiles>(x, *weights, out, rows, threads, parallel);
#endif
    multiply<Pairs>(x, *weights, out, rows, threads, parallel);
#else
    multiply<Floats>(x, *weights, out, rows, threads, parallel);
#endif
}

// Returns whether rounding inputs is faster: AMX multiplies bfloat16 faster than other instructions multiply int8.
bool tandem_rounded_inputs_pay() {
#if defined(__AMX_BF16__)
    return !TileRegisters::are_granted();
#else
    return true;
#endif
}

// Multiplies each row by its expert's weights; the experts' weights are contiguous.
void tandem_routed_linear(
    const Routed* rows, const uint16_t* weights, const uint16_t* bias, int64_t threads, Parallel parallel) {
    const int64_t K = rows->in_features, N = rows->out_features, panels = (N + PANEL - 1) / PANEL;
    each_part(*rows, threads, parallel, [&](const Part& part) {
        const uint16_t* from = weights + (part.expert * panels + part.panel) * PANEL * K;
        const uint16_t* own_bias = bias ? bias + part.expert * N + part.panel * PANEL : nullptr;
        tandem_linear(part.x, from, own_bias, part.out, part.rows, K, part.outputs, 1, nullptr);
    });
}

// Like tandem_routed_linear; `first` has the first expert's weights. A panel has `words` words and `scales` scales.
void tandem_routed_quantized_linear(
    const Routed* rows, const Quantized* first, int64_t words, int64_t scales, int64_t threads, Parallel parallel) {
    const int64_t N = rows->out_features, panels = (N + PANEL - 1) / PANEL;
    each_part(*rows, threads, parallel, [&](const Part& part) {
        const int64_t panel = part.expert * panels + part.panel;
        Quantized q = *first;
        q.words += panel * words, q.scales += panel * scales * q.scale_bytes, q.out_features = part.outputs;
        if (q.minima) q.minima += panel * scales * q.scale_bytes;
        if (q.inputs) q.inputs += part.expert * q.in_features;
        if (q.bias) q.bias += part.expert * N + part.panel * PANEL;
        tandem_quantized_linear(part.x, &q, part.out, part.rows, 1, nullptr);
    });
}
}
