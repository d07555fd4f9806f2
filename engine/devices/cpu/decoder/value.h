// The type of the decoder's rows and weights: bfloat16, or float32 if IN_FLOAT32 is defined, and vectors of it.

#pragma once

#include <cstdint>
#include <cstring>

#include "../../../../native/cache_lines.h"
#include "../../../sampler/choice.h"

namespace {

#if defined(IN_FLOAT32)
using Value = float;

inline Value narrow(float value) { return value; }
#else
using Value = bf16;

inline Value narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return Value((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#endif

inline float rounded(float value) { return widen(narrow(value)); }

using Values = std::vector<Value, InHugePages<Value>>;

}  // namespace
