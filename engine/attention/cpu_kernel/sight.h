// Which keys a query row sees.
#pragma once

#include <algorithm>
#include <cstdint>

// The keys [first, last): by the places that they would have in a chain, in a tree too.
struct Sight {
    int64_t first, last;

    // Bit k: whether key `tile` + k is seen, for the 64 of a tile.
    uint64_t in_tile(int64_t tile) const {
        const int64_t low = std::clamp<int64_t>(first - tile, 0, 64);
        const int64_t high = std::clamp<int64_t>(last - tile, 0, 64);
        return low < high ? ~uint64_t(0) >> (64 - high) & ~uint64_t(0) << low : 0;
    }
};
