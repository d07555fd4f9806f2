// The row operations of gates, rounded where Transformers' modules round.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "row_math.h"

namespace {

constexpr int64_t PIECE = 128;
constexpr float UNIT_EPSILON = 1e-6f;  // from flash-linear-attention
constexpr float LINEAR_FROM = 20;  // softplus is the identity above this value

inline float softplus(float x) { return x > LINEAR_FROM ? x : std::log1p(exp_of(x)); }

// 1 + exp(-x) of at most PIECE values, in a separate loop from the division by them (see gate_row).
template <class T> void denominators(const T* x, int64_t count, float* __restrict out) {
    for (int64_t i = 0; i < count; i++) out[i] = 1 + exp_of(-widen(x[i]));
}

// Scales x to length `length`, in place.
void unit_row(float* __restrict x, int64_t size, float length) {
    const float factor = 1 / std::sqrt(sum_of_squares(x, size) + UNIT_EPSILON);
    for (int64_t i = 0; i < size; i++) x[i] = x[i] * factor * length;
}

// silu, in place.
void silu_row(float* __restrict x, int64_t size) {
    float below[PIECE];
    for (int64_t first = 0; first < size; first += PIECE) {
        const int64_t count = std::min(PIECE, size - first);
        denominators(x + first, count, below);
        for (int64_t i = 0; i < count; i++) x[first + i] = rounded(x[first + i] / below[i]);
    }
}

// x * sigmoid(gate), in place.
void open_row(const Value* __restrict gate, int64_t size, Value* __restrict x) {
    float below[PIECE];
    for (int64_t first = 0; first < size; first += PIECE) {
        const int64_t count = std::min(PIECE, size - first);
        denominators(gate + first, count, below);
        for (int64_t i = 0; i < count; i++) x[first + i] = narrow(widen(x[first + i]) * rounded(1 / below[i]));
    }
}

}  // namespace
