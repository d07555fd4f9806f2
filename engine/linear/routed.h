// Products of rows with different weights, an expert's for each row. All rows of an expert are multiplied together, so
// its weights are read once. As in any batch, the other rows change no bits. Threads join once for all experts.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../native/cache_lines.h"
#include "../../native/parallel.h"
#include "product.h"
#include "routed_rows.h"
#include "shares.h"

namespace {

using Routed = RoutedRows<uint16_t>;

// Some panels of an expert, with the rows that it multiplies.
struct Part {
    int64_t expert, panel;
    const uint16_t* x;
    uint16_t* out;            // [rows][outputs]
    int64_t rows, outputs;
};

// Rows grouped by their experts, with buffers for their results.
class Gathered {
  public:
    explicit Gathered(const Routed& p) : p(p), starts(p.num_experts + 1), places(p.rows, -1) {
        for (int64_t r = 0; r < p.rows; r++)
            if (has_expert(r)) starts[p.experts[r] + 1]++;
        for (int64_t e = 0; e < p.num_experts; e++) starts[e + 1] += starts[e];
        std::vector<int64_t> next(starts);
        x.resize(starts.back() * p.in_features), out.resize(starts.back() * p.out_features);
        for (int64_t r = 0; r < p.rows; r++) {
            if (!has_expert(r)) continue;
            places[r] = next[p.experts[r]]++;
            memcpy(&x[places[r] * p.in_features], p.x + r / p.sharing * p.in_features, p.in_features * sizeof(uint16_t));
        }
    }

    // Splits the panels of each expert with rows into `of_each` parts, or fewer if there are fewer panels.
    std::vector<Part> parts(int64_t of_each) {
        const int64_t panels = (p.out_features + PANEL - 1) / PANEL, step = (panels + of_each - 1) / of_each;
        std::vector<Part> all;
        for (int64_t e = 0; e < p.num_experts; e++) {
            const int64_t first = starts[e], rows = starts[e + 1] - first;
            for (int64_t panel = 0; rows && panel < panels; panel += step) {
                const int64_t n = panel * PANEL, outputs = std::min(step * PANEL, p.out_features - n);
                all.push_back({e, panel, &x[first * p.in_features], &out[first * p.out_features + rows * n], rows, outputs});
            }
        }
        return all;
    }

    void put(const std::vector<Part>& parts) {
        for (int64_t r = 0; r < p.rows; r++)
            if (places[r] < 0) std::fill_n(p.out + r * p.out_features, p.out_features, uint16_t(0));
        std::vector<int64_t> rows(starts.back());
        for (int64_t r = 0; r < p.rows; r++)
            if (places[r] >= 0) rows[places[r]] = r;
        for (const Part& part : parts)
            for (int64_t i = 0; i < part.rows; i++)
                memcpy(p.out + rows[starts[part.expert] + i] * p.out_features + part.panel * PANEL,
                       part.out + i * part.outputs, part.outputs * sizeof(uint16_t));
    }

  private:
    bool has_expert(int64_t r) const { return p.experts[r] >= 0 && p.experts[r] < p.num_experts; }

    const Routed& p;
    std::vector<int64_t> starts, places;  // each expert's first row; each row's place among all experts' rows, or -1
    AlignedVector<uint16_t> x, out;
};

// Calls work(part) for all parts of the experts that have rows, on up to `threads` threads.
template <class Work> void each_part(const Routed& p, int64_t threads, Parallel parallel, const Work& work) {
    Gathered gathered(p);
    if (p.rows * p.in_features * p.out_features < SERIAL_WEIGHTS) threads = 1;
    const std::vector<Part> parts = gathered.parts(threads);
    share_out(int64_t(parts.size()), threads, parallel, [&](int64_t i) { work(parts[i]); });
    gathered.put(parts);
}

}  // namespace
