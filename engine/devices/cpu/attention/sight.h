// The keys that a query row sees.
#pragma once

#include <algorithm>
#include <cstdint>

// A row sees the keys [first, last). For a tree row these are places on its path, counted as in a chain.
struct Sight {
    int64_t first, last;

    // Returns a mask in which bit k says whether the row sees key `tile` + k, for the 64 keys of a tile.
    uint64_t in_tile(int64_t tile) const {
        const int64_t low = std::clamp<int64_t>(first - tile, 0, 64);
        const int64_t high = std::clamp<int64_t>(last - tile, 0, 64);
        return low < high ? ~uint64_t(0) >> (64 - high) & ~uint64_t(0) << low : 0;
    }
};
