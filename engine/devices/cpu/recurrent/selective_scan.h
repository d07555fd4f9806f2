// Mamba's selective scan: linear attention of heads with one value each.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../../../native/exp.h"
#include "path.h"
#include "structs.h"

namespace {

constexpr int64_t HEADS = 64;

// Some heads of a sequence's selective scan. A row's state is the grid point's state plus the tokens since then, one
// after the other: by the same operations whether they ran in this step or are read from the window. The working copy
// of a state is [key_dim, heads], so that heads are computed in parallel.
class Scan {
  public:
    Scan(const LinearAttention& linear, const Spans& spans, const Span& span, int64_t row, int64_t first)
        : in(linear), of(*linear.state_slots), span(span), row(row), grid(spans.grid), window(spans.window), first(first),
          heads(std::min(HEADS, of.heads - first)), size(of.key_dim), base(span.base),
          state(of.state.of<float>(span.state_slot) + first * size), keys(of.keys.of<float>(span.state_slot)),
          deltas(of.deltas.of<float>(span.state_slot) + first), times(of.decays.of<float>(span.state_slot) + first),
          held(size * heads), rates(size * heads) {}

    void run() {
        turn(in.rates + first * size, rates.data(), heads, size);
        turn(state, held.data(), heads, size);
        for (int64_t place = span.start; place < span.start + span.count; place++) {
            const int64_t here = row + place - span.start, inputs = here * of.heads + first;
            find_path(span, place, base, path);
            path.push_back(place);
            follow();
            read_side_by_side(in.query + here * in.query_step, in.out + inputs);
        }
    }

  private:
    const LinearAttention& in;
    const LayerStateSlots& of;
    const Span& span;
    const int64_t row, grid, window, first, heads, size;
    int64_t base;
    float *state, *keys, *deltas, *times;
    std::vector<float> held, rates;
    std::vector<int64_t> path, passed;

    // Adds the path's missing tokens to `held`, which becomes the stored state at grid points of certain tokens.
    void follow() {
        if (passed.size() > path.size() || !std::equal(passed.begin(), passed.end(), path.begin())) {
            turn(state, held.data(), heads, size);
            passed.clear();
        }
        for (size_t next = passed.size(); next < path.size(); next++) {
            const int64_t place = path[next];
            add(place);
            passed.push_back(place);
            if (place >= span.certain || (place + 1) % grid) continue;
            turn(held.data(), state, size, heads);
            base = place + 1;
            passed.clear();
        }
    }

    void add(int64_t place) {
        const int64_t count = heads, at = place % window * of.heads;
        const int64_t here = row + place - span.start;
        const bool is_new = place >= span.start;  // and so not in the window yet; its place may be in use
        const float* key = is_new ? in.key + here * in.key_step : keys + place % window * size;
        if (is_new) {
            memcpy(deltas + at, in.value + here * in.value_step + first, heads * sizeof(float));
            memcpy(times + at, in.decay + here * of.heads + first, heads * sizeof(float));
        }
        const float* __restrict delta = deltas + at;
        const float* __restrict time = times + at;
        for (int64_t k = 0; k < size; k++) {
            const float x = key[k];
            const float* __restrict rate = rates.data() + k * heads;
            float* __restrict cells = held.data() + k * heads;
            for (int64_t h = 0; h < count; h++) cells[h] = cells[h] * exp_of(time[h] * rate[h]) + x * delta[h];
        }
    }

    void read_side_by_side(const float* query, float* out) const {
        const int64_t count = heads;
        float sums[HEADS] = {};
        for (int64_t k = 0; k < size; k++) {
            const float x = query[k];
            const float* __restrict cells = held.data() + k * heads;
            for (int64_t h = 0; h < count; h++) sums[h] += x * cells[h];
        }
        memcpy(out, sums, heads * sizeof(float));
    }

    // Transposes a matrix.
    static void turn(const float* from, float* to, int64_t num_rows, int64_t num_columns) {
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t c = 0; c < num_columns; c++) to[c * num_rows + r] = from[r * num_columns + c];
    }
};

}  // namespace
