// The arguments of a product, and how many outputs a panel of weights has.

#pragma once

#include <cstdint>

namespace {

constexpr int PANEL = 64;  // outputs
constexpr int64_t LINE_VALUES = 32;  // bfloat16 of a cache line

template <class Value> struct ProductOf {
    const Value *x, *weights, *bias;
    Value* out;
    int64_t rows, in_features, out_features;
    int64_t run = 0;  // inputs that are summed before they are scaled, where weights are quantized
};

using Product = ProductOf<uint16_t>;

// The quantized weights of a panel. Each run of inputs is summed, then scaled.
struct Coded {
    const uint16_t* words;
    const float* scales;      // [group][64]
    const float* offsets;     // the same, or null
    const float* input_sums;  // [rows][runs]
    int64_t group, run, runs;
};

// A part of a panel's weights, whose sums are multiplied by a scale and added to the totals.
struct Run {
    int64_t k, count;         // the inputs [k, k + count)
    const float* scales;      // [64]
    const float* offsets;     // [64], or null: these times the sum of a row's inputs are subtracted
    const float* input_sums;  // of the first of some rows
    int64_t sums_stride;      // from one row's to the next's
    float* totals;            // [rows][64]
};

}  // namespace
