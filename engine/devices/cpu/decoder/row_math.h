// The row operations between matrix products, rounded where Transformers' modules round.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "value.h"

namespace {

// The compiler vectorizes these loops: sizes are passed by value, and the output overlaps no other operand.

template <class T> float sum_of_squares(const T* x, int64_t size) {
    constexpr int LANES = 16;
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += widen(x[i + lane]) * widen(x[i + lane]);
    float sum = 0;
    for (; i < size; i++) sum += widen(x[i]) * widen(x[i]);
    for (const float of_lane : sums) sum += of_lane;
    return sum;
}

// How a norm applies its weights. PLAIN: to values that are rounded first. CENTRED: weights are the factors minus 1,
// and only the product is rounded. EXACT: only the product is rounded.
enum Norm : int64_t { PLAIN, CENTRED, EXACT };

// `out` may be x.
void norm_row(const Value* x, const Value* __restrict weight, int64_t how, int64_t size, double epsilon, Value* out) {
    const float factor = 1 / std::sqrt(sum_of_squares(x, size) / float(size) + float(epsilon));
    if (how == EXACT) {
#pragma GCC ivdep
        for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(weight[i]) * (widen(x[i]) * factor));
    } else if (how == CENTRED) {
#pragma GCC ivdep
        for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(x[i]) * factor * (1 + widen(weight[i])));
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(weight[i]) * rounded(widen(x[i]) * factor));
    }
}

void add_row(Value* __restrict sum, const Value* __restrict summand, int64_t size) {
    for (int64_t i = 0; i < size; i++) sum[i] = narrow(widen(sum[i]) + widen(summand[i]));
}

void square_row(const Value* __restrict x, int64_t size, Value* __restrict out) {
    for (int64_t i = 0; i < size; i++) {
        const float above = std::max(widen(x[i]), 0.0f);
        out[i] = narrow(above * above);
    }
}

void scale_row(Value* row, float factor, int64_t size) {
    for (int64_t i = 0; i < size; i++) row[i] = narrow(widen(row[i]) * factor);
}

void scale_row(Value* __restrict row, const float* __restrict factors, int64_t size) {
    for (int64_t i = 0; i < size; i++) row[i] = narrow(widen(row[i]) * factors[i]);
}

void divide_row(Value* row, float divisor, int64_t size) {
    for (int64_t i = 0; i < size; i++) row[i] = narrow(widen(row[i]) / divisor);
}

enum Activation : int64_t { SILU, RELU2, GELU_TANH, CLAMPED_SWIGLU };

constexpr float SWIGLU_SLOPE = 1.702f, SWIGLU_LIMIT = 7;

// GELU by tanh (Hendrycks & Gimpel, 2016) is x times the sigmoid of this.
inline float gelu_exponent(float x) { return 1.5957691216f * (x + 0.044715f * x * x * x); }

// gate * sigmoid(exponent(gate)) * up, in two loops. In a single loop the compiler would also divide every value by
// exp_of's upper limit, and the denormal quotients take Intel's CPUs a hundred cycles each.
template <class Exponent>
void gate_row(const Value* __restrict gate, const Value* __restrict up, int64_t size, Value* __restrict out,
              const Exponent& exponent) {
    constexpr int64_t PART = 128;
    float powers[PART];
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t count = std::min(PART, size - first);
        for (int64_t i = 0; i < count; i++) powers[i] = exp_of(-exponent(widen(gate[first + i])));
        for (int64_t i = 0; i < count; i++)
            out[first + i] = narrow(rounded(widen(gate[first + i]) / (1 + powers[i])) * widen(up[first + i]));
    }
}

// gpt-oss's gates, each followed by its value.
void clamped_gate_row(const Value* __restrict made, int64_t size, Value* __restrict out) {
    constexpr int64_t PART = 128;
    float gates[PART], powers[PART];
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t count = std::min(PART, size - first);
        const Value* pairs = made + 2 * first;
        for (int64_t i = 0; i < count; i++) gates[i] = std::min(widen(pairs[2 * i]), SWIGLU_LIMIT);
        for (int64_t i = 0; i < count; i++) powers[i] = exp_of(-rounded(gates[i] * SWIGLU_SLOPE));
        for (int64_t i = 0; i < count; i++) {
            const float value = std::max(-SWIGLU_LIMIT, std::min(widen(pairs[2 * i + 1]), SWIGLU_LIMIT));
            out[first + i] = narrow(rounded(value + 1) * rounded(gates[i] * rounded(1 / (1 + powers[i]))));
        }
    }
}

void rotate_head(Value* head, const Value* cosine, const Value* sine, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = widen(head[i]), high = widen(head[i + half]);
        const float low_cosine = rounded(low * widen(cosine[i])), high_sine = rounded(-high * widen(sine[i]));
        const float high_cosine = rounded(high * widen(cosine[i + half])), low_sine = rounded(low * widen(sine[i + half]));
        head[i] = narrow(low_cosine + high_sine);
        head[i + half] = narrow(high_cosine + low_sine);
    }
}

}  // namespace
