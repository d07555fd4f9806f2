// Rows that are multiplied each by its own expert's weights. structs.py has the same struct.

#pragma once

#include <cstdint>

namespace {

template <class Value> struct RoutedRows {
    const Value* x;           // [rows / sharing][in_features]
    const int64_t* experts;   // [rows]: whose weights multiply a row; one that there is not gives zeros
    Value* out;               // [rows][out_features]
    int64_t rows, sharing;    // so many rows, one behind the other, have the same inputs
    int64_t num_experts, in_features, out_features;
};

}  // namespace
