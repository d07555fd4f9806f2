// The code that the tiles in vector registers share (floats.h and pairs.h).

#pragma once

#include <cstdint>

#include "product.h"

namespace {

template <class Tiles, class Value> struct VectorTiles {
    using Input = Value;
    struct Registers {};

    static constexpr int ROWS = 6;  // 6 x 4 sums and 4 weights fit into 32 registers

    // The rows [first, end) of one panel; `x` are the inputs of the first.
    static void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        int64_t row = first;
        const auto inputs = [&] { return x + (row - first) * p.in_features; };
        for (; row + ROWS <= end; row += ROWS) Tiles::template tile<ROWS>(p, inputs(), row, panel);
        switch (end - row) {
            case 1: return Tiles::template tile<1>(p, inputs(), row, panel);
            case 2: return Tiles::template tile<2>(p, inputs(), row, panel);
            case 3: return Tiles::template tile<3>(p, inputs(), row, panel);
            case 4: return Tiles::template tile<4>(p, inputs(), row, panel);
            case 5: return Tiles::template tile<5>(p, inputs(), row, panel);
        }
    }
};

}  // namespace
