// An adapter's products, and the rows that they are added for. structs.py has the same structs, with `Args` after
// their names.

#pragma once

#include <cstdint>

#include "../../native/parallel.h"

namespace {

// Beside one linear layer: down [rank, in], up [rank, out], in bfloat16, packed as packed.py says, the scale within
// `up`. Ranks are whole fours. Its outputs [begin, end) are wanted, from `first` on in a row of the product. Without
// `down` there is nothing to add.
struct Part {
    const uint16_t *down, *up;
    int64_t rank, in, begin, end, first;
};

// Rows of one adapter, and what is to be added to one product of them.
struct Adapted {
    const Part* parts;
    int64_t num_parts;
    const int64_t* rows;
    int64_t count;
};

// Of rows of `x` that lie `in` apart, to rows of `out` that lie `stride` apart.
template <class Value>
using Adapt = void (*)(const Value* x, int64_t in, Value* out, int64_t stride, const Adapted* adapted,
                       int64_t num_adapted, int64_t threads, Parallel parallel);

}  // namespace
