// One head of linear attention, with or without the delta rule.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../../../native/exp.h"
#include "../attention/simd.h"
#include "path.h"
#include "structs.h"

namespace {

constexpr int TILE = 4;  // vectors of columns

inline float dot(const float* a, const float* b, int64_t count) {
    Vec sums{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += load(a + i) * load(b + i);
    float sum = sum_of_lanes(sums);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum;
}

// Loads a vector of columns, or a single column.
template <class Columns> Columns from(const float* row) {
    Columns columns;
    memcpy(&columns, row, sizeof columns);
    return columns;
}

// Calls work(first, columns) for all columns: TILE vectors at a time, whose sums stay in registers, then single vectors
// and single columns. `columns` is an array of the vectors, or of the single column.
template <class Work> void for_columns(int64_t count, const Work& work) {
    int64_t first = 0;
    for (; first + TILE * LANES <= count; first += TILE * LANES) work(first, std::array<Vec, TILE>{});
    for (; first + LANES <= count; first += LANES) work(first, std::array<Vec, 1>{});
    for (; first < count; first++) work(first, std::array<float, 1>{});
}

// sums += factor * row.
template <class Columns> void add(Columns& sums, float factor, const float* row) {
    using Each = typename Columns::value_type;
    for (size_t i = 0; i < sums.size(); i++) sums[i] += factor * from<Each>(row + i * sizeof(Each) / sizeof(float));
}

// A thread's buffers, kept from one head to the next.
struct Scratch {
    std::vector<float> far_query, far_key, decayed, by_query, by_key, origin, drafted;
    std::vector<const float*> added;
    std::vector<int64_t> path, passed;

    void fit(const LayerStateSlots& of, int64_t grid) {
        far_query.resize(of.key_dim), far_key.resize(of.key_dim), decayed.resize(grid * of.key_dim);
        by_query.resize(grid), by_key.resize(grid), added.resize(grid), origin.assign(of.decay_dim, 0);
        passed.clear();
    }
};

// One head of a sequence.
class Head {
  public:
    Head(const LinearAttention& linear, const Spans& spans, const Span& span, int64_t row, int64_t head, Scratch& own)
        : in(linear), of(*linear.state_slots), span(span), row(row), grid(spans.grid), window(spans.window), head(head),
          key_head(head / (of.heads / of.key_heads)), base(span.base),
          state(of.state.of<float>(span.state_slot) + head * of.key_dim * of.value_dim),
          keys(of.keys.of<float>(span.state_slot) + key_head * of.key_dim),
          deltas(of.deltas.of<float>(span.state_slot) + head * of.value_dim),
          decays(of.decays.of<float>(span.state_slot) + head * of.decay_dim), own(own) {
        own.fit(of, grid);
    }

    void run() {
        const int64_t end = span.start + span.count;
        for (int64_t place = span.start; place < end; place++) {
            settle(place);
            find_path(span, place, base, own.path);
            const int64_t left = own.path.size() % grid, whole = own.path.size() - left;
            attend(place, whole ? ahead(whole) : state, own.path.data() + whole, left);
        }
        settle(end);
    }

  private:
    const LinearAttention& in;
    const LayerStateSlots& of;
    const Span& span;
    const int64_t row, grid, window, head, key_head;
    int64_t base;
    float *state, *keys, *deltas, *decays;
    Scratch& own;

    float* delta_at(int64_t place) { return deltas + place % window * of.heads * of.value_dim; }

    // Returns the sums of the logarithms of the decays from the grid point through this place.
    float* decay_at(int64_t place) { return decays + place % window * of.heads * of.decay_dim; }

    // Multiplies a key or query by the decays between two places; `origin` stands for the grid point.
    void decay(const float* rows, const float* since, const float* until, float* __restrict out) {
        const int64_t size = of.key_dim;
        if (of.decay_dim == 1) {
            const float factor = exp_of(until[0] - since[0]);
            for (int64_t k = 0; k < size; k++) out[k] = rows[k] * factor;
        } else {
            for (int64_t k = 0; k < size; k++) out[k] = exp_of(until[k] - since[k]);
            for (int64_t k = 0; k < size; k++) out[k] *= rows[k];
        }
    }

    // Returns a place's key. This step's keys are read from the input: heads share them; `keys` gets them at the end.
    const float* key_at(int64_t place) const {
        if (place < span.start) return keys + place % window * of.key_heads * of.key_dim;
        return in.key + (row + place - span.start) * in.key_step + key_head * of.key_dim;
    }

    // Advances the state to the last grid point before `place` whose tokens are certain.
    void settle(int64_t place) {
        for (; base + grid <= std::min(place, span.certain); base += grid) {
            find_path(span, base + grid, base, own.path);
            advance(state, own.path.data());
        }
    }

    // Returns the state after `count` drafted tokens of the path. Rows of a chain, and most rows of a tree, share it.
    const float* ahead(int64_t count) {
        auto &passed = own.passed, &path = own.path;
        if (int64_t(passed.size()) > count || !std::equal(passed.begin(), passed.end(), path.begin())) passed.clear();
        if (passed.empty()) own.drafted.assign(state, state + of.key_dim * of.value_dim);
        for (int64_t first = passed.size(); first < count; first += grid) advance(own.drafted.data(), path.data() + first);
        passed.assign(path.begin(), path.begin() + count);
        return own.drafted.data();
    }

    // Computes one row from a state and the `count` places after it.
    void attend(int64_t place, const float* state, const int64_t* places, int64_t count) {
        const int64_t at = row + place - span.start, dim = of.value_dim;
        const float* query = in.query + at * in.query_step + key_head * of.key_dim;
        const float* key = key_at(place);
        const float* value = in.value + at * in.value_step + head * dim;
        float *out = in.out + (at * of.heads + head) * dim, *delta = delta_at(place);
        const float* before = count ? decay_at(places[count - 1]) : own.origin.data();
        float* total = decay_at(place);
        for (int64_t i = 0; i < of.decay_dim; i++) total[i] = before[i] + in.decay[(at * of.heads + head) * of.decay_dim + i];
        decay(query, own.origin.data(), total, own.far_query.data());
        if (in.beta) decay(key, own.origin.data(), total, own.far_key.data());
        for (int64_t other = 0; other < count; other++) weigh(query, key, places[other], total, other);
        const float strength = in.beta ? in.beta[at * of.heads + head] : 0, alike = dot(query, key, of.key_dim);
        for_columns(dim, [&](int64_t first, auto zeros) {
            using Each = typename decltype(zeros)::value_type;
            auto seen = zeros, lacks = zeros;
            for (int64_t k = 0; k < of.key_dim; k++) {
                add(seen, own.far_query[k], state + k * dim + first);
                if (in.beta) add(lacks, own.far_key[k], state + k * dim + first);
            }
            for (int64_t other = 0; other < count; other++) {
                add(seen, own.by_query[other], own.added[other] + first);
                if (in.beta) add(lacks, own.by_key[other], own.added[other] + first);
            }
            for (size_t i = 0; i < zeros.size(); i++) {
                const int64_t column = first + i * sizeof(Each) / sizeof(float);
                Each added = from<Each>(value + column);
                if (in.beta) added = strength * (added - lacks[i]);
                seen[i] += alike * added;
                memcpy(delta + column, &added, sizeof added), memcpy(out + column, &seen[i], sizeof added);
            }
        });
    }

    // Computes the weight with which a row reads the delta of `place`, which is the `index`-th place after the state.
    void weigh(const float* query, const float* key, int64_t place, const float* total, int64_t index) {
        const float *since = decay_at(place), *known = key_at(place);
        own.added[index] = delta_at(place);
        float weight = 1;
        if (of.decay_dim == 1) {
            weight = exp_of(total[0] - since[0]);
        } else {
            decay(known, since, total, own.decayed.data());
            known = own.decayed.data();
        }
        own.by_query[index] = dot(query, known, of.key_dim) * weight;
        if (in.beta) own.by_key[index] = dot(key, known, of.key_dim) * weight;
    }

    // Advances a state from one grid point to the next, by the places between them.
    void advance(float* state, const int64_t* places) {
        const int64_t keys = of.key_dim, dim = of.value_dim;
        const float* total = decay_at(places[grid - 1]);
        for (int64_t other = 0; other < grid; other++) {
            own.added[other] = delta_at(places[other]);
            decay(key_at(places[other]), decay_at(places[other]), total, &own.decayed[other * keys]);
        }
        for_columns(dim, [&](int64_t first, auto cells) {
            for (int64_t k = 0; k < keys; k++) {
                cells = {};
                add(cells, exp_of(total[of.decay_dim == 1 ? 0 : k]), state + k * dim + first);
                for (int64_t other = 0; other < grid; other++)
                    add(cells, own.decayed[other * keys + k], own.added[other] + first);
                memcpy(state + k * dim + first, &cells, sizeof cells);
            }
        });
    }
};

}  // namespace
