// What is multiplied, and how the weights lie.

#pragma once

#include <cstdint>

namespace {

constexpr int PANEL = 64;  // outputs

struct Product {
    const uint16_t *x, *weights, *bias;
    uint16_t* out;
    int64_t rows, in_features, out_features;
};

}  // namespace
