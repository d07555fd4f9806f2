// The code that the tiles in vector registers share (floats.h and pairs.h).

#pragma once

#include <cstdint>

#include "product.h"

namespace {

template <class Tiles, class Value> struct VectorTiles {
    using Input = Value;
    struct Registers {
        explicit Registers(const Product&) {}
    };

    static constexpr int ROWS = 6;  // 6 x 4 sums and 4 weights fit into 32 registers
    static constexpr int64_t FEW_ROWS = INT64_MAX, LONGEST_RUN = 128;  // each run's weights are asked for once

    // The rows [first, end) of one panel; `x` are the inputs of the first.
    static void rows_of_panel(const Product& p, const Input* x, int64_t first, int64_t end, int64_t panel) {
        in_tiles(first, end, [&](auto rows, int64_t row) {
            Tiles::template tile<rows()>(p, x + (row - first) * p.in_features, row, panel);
        });
    }

    // The same rows, of a run. weights(k, count) are those of the panel for the inputs [k, k + count).
    template <class Weights>
    static void rows_of_run(
        const Product& p, const Input* x, int64_t first, int64_t end, const Run& run, const Weights& weights) {
        const uint16_t* w = weights(run.k, run.count);
        in_tiles(first, end, [&](auto rows, int64_t row) {
            Tiles::template tile_of_run<rows()>(p, w, x + (row - first) * p.in_features + run.k, row - first, run);
        });
    }

  private:
    template <int N> struct Count {
        constexpr int operator()() const { return N; }
    };

    template <class Work> static void in_tiles(int64_t first, int64_t end, const Work& work) {
        int64_t row = first;
        for (; row + ROWS <= end; row += ROWS) work(Count<ROWS>{}, row);
        switch (end - row) {
            case 1: return work(Count<1>{}, row);
            case 2: return work(Count<2>{}, row);
            case 3: return work(Count<3>{}, row);
            case 4: return work(Count<4>{}, row);
            case 5: return work(Count<5>{}, row);
        }
    }
};

}  // namespace
