// The keys on a tree row's path, and the place that each would have in a chain.
#pragma once

#include <algorithm>
#include <cstdint>

#include "product.h"

// A tile of the path as a chain: place k < end holds the key from[k] keys after the tile's first.
struct Path {
    int from[TILE];
    int end = 0;

    // Bit i of `rows` says whether the tree's row i is on the path. The tree's keys begin `start` keys after the tile's
    // first; `start` may be negative.
    Path(uint64_t rows, int64_t start) {
        for (; end < std::min<int64_t>(start, TILE); end++) from[end] = end;
        for (int64_t k = start; rows && k < TILE; k++, rows &= rows - 1)
            if (k >= 0) from[end++] = int(start + __builtin_ctzll(rows));
    }
};
