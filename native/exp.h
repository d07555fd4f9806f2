// An exponential that compilers can vectorize.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// exp by a polynomial on [-ln2/2, ln2/2], so that loops over it are vectorized; relative error below 1e-6.
inline float exp_of(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const float p = 1 + r * (1 + r * (0.5f + r * (0.166666657f + r * (0.0416657962f + r * (8.33345205e-3f + r * 1.39819994e-3f)))));
    const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

}  // namespace
