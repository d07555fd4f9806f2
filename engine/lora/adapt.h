// An adapter's products, and the rows they apply to.

#pragma once

#include <cstdint>

#include "../../native/parallel.h"

namespace {

// An adapter's product for one linear layer: down [rank, in] and up [rank, out], in bfloat16, packed as in packed.py,
// with the scale folded into `up`. `rank` is a multiple of 4. Outputs [begin, end) are added to an output row from
// `first` on. A null `down` adds nothing.
struct Part {
    const uint16_t *down, *up;
    int64_t rank, inputs, begin, end, first;
};

// The rows of one adapter, and the parts to add to a product's outputs.
struct Adapted {
    const Part* parts;
    int64_t num_parts;
    const int64_t* rows;
    int64_t count;
};

// Reads rows of `x` with stride `in`, and adds to rows of `out` with stride `stride`.
template <class Value>
using Adapt = void (*)(const Value* x, int64_t in, Value* out, int64_t stride, const Adapted* adapted,
                       int64_t num_adapted, int64_t threads, Parallel parallel);

}  // namespace
