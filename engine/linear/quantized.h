// A product with quantized weights. Of each panel some inputs' weights at a time are expanded to bfloat16, which stay
// in the first cache while all rows are multiplied by them, as bfloat16 weights are; where many rows have long runs,
// the panel's are expanded at once, for the second cache. A run of inputs, which share their scales, is summed in
// float32; then the sums are scaled and added up, over ascending inputs. So a row's result has the same bits in every
// batch.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"
#include "product.h"
#include "shares.h"

namespace {

// structs.py has the same struct, with `Args` after its name.
struct Quantized {
    const uint16_t* words;     // see codes.h
    const float* scales;       // [n / 64][group][64]
    const float* offsets;      // the same, or null: a scale times its zero point
    const int32_t* inputs;     // [in_features]: the input that each code multiplies; null: in their order
    const uint16_t* bias;      // null for none
    int64_t in_features, out_features;
    int64_t group;             // inputs that share a scale; a multiple of 32
    int64_t format;
};

constexpr int64_t SLICE = 128;  // inputs whose weights are expanded at a time, 16 KiB

constexpr int64_t LINE_VALUES = 32;  // bfloat16 of a cache line

struct alignas(64) Line {
    uint16_t values[LINE_VALUES];
};

// Inputs in the order of the codes; and of each row the sums of the inputs that share a scale, where offsets need them.
struct Inputs {
    std::vector<uint16_t> ordered;
    std::vector<float> sums;

    const uint16_t* order(const uint16_t* x, const Quantized& q, int64_t rows) {
        if (!q.inputs) return x;
        const int64_t K = q.in_features;
        ordered.resize(rows * K);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < K; k++) ordered[r * K + k] = x[r * K + q.inputs[k]];
        return ordered.data();
    }

    // [rows][runs], each over ascending inputs in 16 lanes.
    void add_up(const uint16_t* x, const Quantized& q, int64_t rows, int64_t run, int64_t runs) {
        sums.resize(rows * runs);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < runs; i++) {
                const uint16_t* from = x + r * q.in_features + i * run;
                float lanes[16] = {}, sum = 0;
                for (int64_t k = 0; k < std::min(run, q.in_features - i * run); k += 16)
                    for (int lane = 0; lane < 16; lane++) lanes[lane] += bf16_to_float(from[k + lane]);
                for (const float lane : lanes) sum += lane;
                sums[r * runs + i] = sum;
            }
    }
};

constexpr int64_t AHEAD = 64;  // times WORDS, 16 KiB: how far ahead codes are fetched, into the second cache

// Weights of one panel for the inputs [k, k + count).
template <class Codes> void expand(const Quantized& q, int64_t panel, int64_t k, int64_t count, uint16_t* to) {
    constexpr int64_t INPUTS = 2 * Codes::CODES;
    const uint16_t* words = q.words + (panel * q.in_features + k) / INPUTS * WORDS;
    for (int64_t i = 0; i < count / INPUTS; i++) {
        for (int64_t line = 0; line < WORDS; line += 32) __builtin_prefetch(words + (i + AHEAD) * WORDS + line, 0, 2);
        Codes::expand(words + i * WORDS, to + i * INPUTS * PANEL);
    }
}

template <class Tiles, class Codes>
void multiply(const uint16_t* x, const Quantized& q, uint16_t* out, int64_t rows, int64_t most_threads, Parallel parallel) {
    const int64_t K = q.in_features, run = std::min(q.group, Tiles::LONGEST_RUN);
    const int64_t groups = K / q.group, runs = (K + run - 1) / run;
    thread_local Inputs prepared;
    x = prepared.order(x, q, rows);
    if (q.offsets) prepared.add_up(x, q, rows, run, runs);
    const float* input_sums = prepared.sums.data();
    const Product p{x, nullptr, q.bias, out, rows, K, q.out_features};
    each_panel<Tiles>(p, most_threads, parallel, [&](auto& tiles, const auto* inputs, int64_t first, int64_t end, int64_t panel) {
        static thread_local std::vector<Line> lines;
        static thread_local float totals[BLOCK_ROWS * PANEL];
        const bool are_few = end - first <= Tiles::FEW_ROWS, whole = !are_few && run > SLICE;
        const int64_t at_once = whole ? 2 * Tiles::FEW_ROWS : BLOCK_ROWS;
        lines.resize((whole ? K : SLICE) * PANEL / LINE_VALUES);
        uint16_t* expanded = lines.data()->values;
        if (whole) expand<Codes>(q, panel, 0, K, expanded);
        for (int64_t row = first; row < end; row += at_once) {
            const int64_t last = std::min(row + at_once, end);
            std::fill_n(totals, (last - row) * PANEL, 0.0f);
            for (int64_t i = 0, k = 0; k < K; i++, k += run) {
                const int64_t count = std::min(run, K - k), scale = (panel * groups + k / q.group) * PANEL;
                const Run of_run{k, count, q.scales + scale, q.offsets ? q.offsets + scale : nullptr,
                                 input_sums + row * runs + i, runs, totals};
                if (!are_few && !whole) expand<Codes>(q, panel, k, count, expanded);
                tiles.rows_of_run(p, inputs + (row - first) * K, row, last, of_run, [&](int64_t from, int64_t some) {
                    if (!are_few) return expanded + (whole ? from : from - k) * PANEL;
                    uint16_t* to = expanded + from % SLICE * PANEL;
                    expand<Codes>(q, panel, from, some, to);
                    return to;
                });
            }
            tiles.put_totals(p, totals, row, last, panel);
        }
    });
}

template <class Tiles>
void multiply(const uint16_t* x, const Quantized& q, uint16_t* out, int64_t rows, int64_t most_threads, Parallel parallel) {
    switch (q.format) {
        case INT8: return multiply<Tiles, Int8>(x, q, out, rows, most_threads, parallel);
        case INT4: return multiply<Tiles, Int4>(x, q, out, rows, most_threads, parallel);
        case FP8: return multiply<Tiles, Fp8>(x, q, out, rows, most_threads, parallel);
        case MXFP4: return multiply<Tiles, Mxfp4>(x, q, out, rows, most_threads, parallel);
    }
}

}  // namespace
