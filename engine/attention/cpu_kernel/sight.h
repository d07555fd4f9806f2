// Which keys a query row sees.
#pragma once

#include <algorithm>
#include <cstdint>

// The keys [first, last), and of the 64 from key `tree` on those whose bit in `path` is set.
struct Sight {
    int64_t first, last;
    int64_t tree = 0;
    uint64_t path = 0;

    // Bit k: whether key `tile` + k is seen, for the 64 of a tile.
    uint64_t in_tile(int64_t tile) const {
        return range(first - tile, last - tile) | shifted(path, tree - tile);
    }

  private:
    static uint64_t range(int64_t low, int64_t high) {
        low = std::clamp<int64_t>(low, 0, 64);
        high = std::clamp<int64_t>(high, 0, 64);
        return low < high ? ~uint64_t(0) >> (64 - high) & ~uint64_t(0) << low : 0;
    }

    static uint64_t shifted(uint64_t bits, int64_t left) {
        if (left <= -64 || left >= 64) return 0;
        return left < 0 ? bits >> -left : bits << left;
    }
};

// The last `count` bits that are set.
static inline uint64_t last_bits(uint64_t bits, int64_t count) {
    while (__builtin_popcountll(bits) > count) bits &= bits - 1;
    return bits;
}
