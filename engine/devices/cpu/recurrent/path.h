// The tokens before a row, and the grid point of a state after a step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "structs.h"

namespace {

// Finds the places of the tokens before a row, from position `first` on, in order of their positions.
void find_path(const Span& span, int64_t place, int64_t first, std::vector<int64_t>& path) {
    path.clear();
    int64_t position = first;
    const int64_t root = span.masks ? span.tree_start : place;
    for (; position < root; position++) path.push_back(position);
    if (!span.masks) return;
    position = root;
    for (uint64_t bits = span.masks[place - span.start]; bits & (bits - 1); bits &= bits - 1)
        if (position++ >= first) path.push_back(root + __builtin_ctzll(bits));
}

// Returns the grid point of a span's state after its rows have run.
int64_t next_base(const Span& span, int64_t grid) {
    return std::max(std::min(span.certain, span.start + span.count) / grid * grid, span.base);
}

}  // namespace
