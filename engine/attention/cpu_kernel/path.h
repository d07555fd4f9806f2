// Where a tree row's keys lie, and where they would in a chain.
#pragma once

#include <algorithm>
#include <cstdint>

#include "product.h"

// A tile's places in a chain: place k < end has the key that lies from[k] behind the tile's first.
struct Path {
    int from[TILE];
    int end = 0;

    // `rows` are the tree's that are seen, as bits; their keys begin `start` behind the tile's first, or before it.
    Path(uint64_t rows, int64_t start) {
        for (; end < std::min<int64_t>(start, TILE); end++) from[end] = end;
        for (int64_t k = start; rows && k < TILE; k++, rows &= rows - 1)
            if (k >= 0) from[end++] = int(start + __builtin_ctzll(rows));
    }
};
