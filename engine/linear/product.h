// The arguments of a product, and the number of outputs in a panel of weights.

#pragma once

#include <cstdint>

#include "scales.h"

namespace {

constexpr int PANEL = 64;  // outputs
constexpr int64_t LINE_VALUES = 32;  // bfloat16 values of a cache line

template <class Value> struct ProductOf {
    const Value *x, *weights, *bias;
    Value* out;
    int64_t rows, in_features, out_features;
    int64_t run = 0;  // inputs summed before scaling, for quantized weights
};

using Product = ProductOf<uint16_t>;

// The quantized weights of a panel. Each run of inputs is summed, then scaled.
struct Coded {
    const uint16_t* words;
    Scales scales;
    const float* input_sums;  // [rows][runs]
    int64_t group, run, runs;
};

// A run of inputs of a panel, whose sums are scaled and added to the totals.
struct Run {
    int64_t k, count;         // the inputs [k, k + count)
    Scales scales;
    const float* input_sums;  // sums of the inputs of the first row
    int64_t sums_stride;      // from one row to the next
    float* totals;            // [rows][64]
};

}  // namespace
