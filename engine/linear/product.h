// The arguments of a product, and how many outputs a panel of weights has.

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
