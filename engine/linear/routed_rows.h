// Rows that are each multiplied by an expert's weights. packed.py mirrors it, with `Args` after its name.

#pragma once

#include <cstdint>

namespace {

template <class Value> struct RoutedRows {
    const Value* x;           // [rows / sharing][in_features]
    const int64_t* experts;   // [rows]: each row's expert; an index outside the experts gives zeros
    Value* out;               // [rows][out_features]
    int64_t rows, sharing;    // `sharing`: number of consecutive rows with the same inputs
    int64_t num_experts, in_features, out_features;
};

}  // namespace
