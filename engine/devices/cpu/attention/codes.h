// Rows of the pool with one byte for each value: a token's key or value of one head is stored as codes, with a separate
// float32 scale. A value is its code times the scale. Each row is written once, from its own values only.
#pragma once

#include "simd.h"

struct Int8 {
    int8_t code;
    static constexpr float LARGEST = 127;
};
struct Fp8 {  // OCP's E4M3 without infinities
    uint8_t code;
    static constexpr float LARGEST = 448;
};

template <class Element> inline constexpr bool is_coded = false;
template <> inline constexpr bool is_coded<Int8> = true;
template <> inline constexpr bool is_coded<Fp8> = true;

constexpr int MAX_CODES = 512;  // most codes of a row
constexpr float SMALLEST = 1e-30f;  // rows with no larger value are stored as zeros

static inline float to_float(float x) { return x; }
static inline float to_float(uint16_t x) { return bf16_to_float(x); }

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline Int8 to_code(float x, Int8) { return {int8_t(int32_t(__builtin_rintf(x)))}; }
static inline Fp8 to_code(float x, Fp8) {  // to nearest, ties to even
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = uint32_t(int32_t(__builtin_rintf(float_of(magnitude) * 512)));
    const uint32_t normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    return {uint8_t((magnitude < bits_of(1.0f / 64) ? subnormal : normal) | (bits >> 24 & 0x80))};
}

static inline float from_code(Fp8 x) {
    return float_of((x.code & 0x7fu) << 20 | (x.code & 0x80u) << 24) * 0x1p120f;
}

// Encodes a row. A value that is not finite makes the scale NaN, and so all results from the row.
template <class Code, class Element> static void encode(const Element* row, int head_dim, Code* to, float* scale) {
    uint32_t most = 0;  // without its sign, a float orders like its bits
    for (int d = 0; d < head_dim; d++) {
        const uint32_t magnitude = bits_of(to_float(row[d])) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    const float top = float_of(most);
    const bool finite = most < 0x7f800000, is_zero = top < SMALLEST;
    const float inverse = is_zero || !finite ? 0 : Code::LARGEST / top;
    *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : is_zero ? 0 : top / Code::LARGEST;
    for (int d = 0; d < head_dim; d++) to[d] = to_code(finite ? to_float(row[d]) * inverse : 0, Code{});
}

// Returns the scale of one of the heads; their scales begin `distance` bytes after the row.
template <class Code> static inline float scale_of(const Code* row, int64_t distance, int head) {
    return ((const float*)((const char*)row + distance))[head];
}
