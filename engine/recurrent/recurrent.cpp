// The operators of recurrent layers on a CPU (operators.py says what they compute).
//
// A unit of work is one sequence and one head, or one block of a convolution's channels: its rows run one after the
// other, and each sum has its terms in an order that the row's position decides. So bits depend neither on chunks,
// company nor threads. Nor do they on drafts: a state only ever holds tokens that are certain, and what drafts leave in
// a window is written again before it is read.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../native/exp.h"
#include "../../native/parallel.h"
#include "structs.h"

namespace {

constexpr int64_t CHANNELS = 512;
constexpr int64_t HEADS = 64;
constexpr int SUMS = 16;
constexpr int64_t TILE = 64;

inline float as_float(float x) { return x; }

inline float as_float(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The places of the tokens before a row, from position `first` on, in order of their positions.
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

// The grid point of a span's state once its rows have run.
int64_t next_base(const Span& span, int64_t grid) {
    return std::max(std::min(span.certain, span.start + span.count) / grid * grid, span.base);
}

// One block of channels of a sequence's convolution.
template <class Word> void convolve(const Conv& conv, const Span& span, int64_t row, const Spans& of, int64_t first) {
    const int64_t channels = conv.channels, reach = conv.taps - 1, count = std::min(CHANNELS, channels - first);
    const Word* inputs = (const Word*)conv.inputs + row * channels + first;
    Word* tail = (Word*)(conv.tail + span.seat * conv.tail_step) + first;
    Word* recent = (Word*)(conv.recent + span.seat * conv.recent_step) + first;
    const int64_t end = span.start + span.count;
    auto at = [&](int64_t place) -> const Word* {
        if (place >= span.start) return inputs + (place - span.start) * channels;
        if (place >= span.base) return recent + place % of.window * channels;
        return tail + (place - span.base + reach) * channels;
    };
    std::vector<int64_t> path;
    for (int64_t place = span.start; place < end; place++) {
        find_path(span, place, (span.masks ? span.tree_start : place) - reach, path);
        path.push_back(place);
        const int64_t* places = path.data() + path.size() - conv.taps;
        float* out = conv.out + (row + place - span.start) * channels + first;
        for (int64_t tap = 0; tap <= reach; tap++) {
            const Word* input = at(places[tap]);
            const float* weight = conv.weight + tap * channels + first;
            if (tap == 0)
                for (int64_t c = 0; c < count; c++) out[c] = weight[c] * as_float(input[c]);
            else
                for (int64_t c = 0; c < count; c++) out[c] += weight[c] * as_float(input[c]);
        }
        if (conv.bias)
            for (int64_t c = 0; c < count; c++) out[c] += conv.bias[first + c];
    }
    const int64_t next = next_base(span, of.grid);
    if (next > span.base)
        for (int64_t place = 0; place < reach; place++)
            memcpy(tail + place * channels, at(next - reach + place), count * sizeof(Word));
    for (int64_t place = std::max(next, span.start); place < end; place++)
        memcpy(recent + place % of.window * channels, at(place), count * sizeof(Word));
}

inline float dot(const float* a, const float* b, int64_t count) {
    float sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int lane = 0; lane < SUMS; lane++) sums[lane] += a[i + lane] * b[i + lane];
    for (int lane = 0; i < count; i++, lane++) sums[lane] += a[i] * b[i];
    for (int half = SUMS / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

// What one vector, or two, read of a state [key_dim, value_dim].
template <bool two> void read(const float* state, int64_t keys, int64_t values, const float* a, const float* b, float* from_a, float* from_b) {
    for (int64_t first = 0; first < values; first += TILE) {
        const int64_t count = std::min(TILE, values - first);
        float sums_a[TILE] = {}, sums_b[TILE] = {};
        for (int64_t k = 0; k < keys; k++) {
            const float* row = state + k * values + first;
            const float x = a[k], y = two ? b[k] : 0;
            if (count == TILE)
                for (int64_t v = 0; v < TILE; v++) {
                    sums_a[v] += x * row[v];
                    if (two) sums_b[v] += y * row[v];
                }
            else
                for (int64_t v = 0; v < count; v++) {
                    sums_a[v] += x * row[v];
                    if (two) sums_b[v] += y * row[v];
                }
        }
        memcpy(from_a + first, sums_a, count * sizeof(float));
        if (two) memcpy(from_b + first, sums_b, count * sizeof(float));
    }
}

// One head of a sequence.
class Head {
  public:
    Head(const Linear& linear, const Spans& spans, const Span& span, int64_t row, int64_t head)
        : of(linear), span(span), row(row), grid(spans.grid), window(spans.window), head(head),
          key_head(head / (linear.heads / linear.key_heads)), base(span.base),
          state((float*)(of.state + span.seat * of.state_step) + head * of.key_dim * of.value_dim),
          keys((float*)(of.keys + span.seat * of.keys_step) + key_head * of.key_dim),
          deltas((float*)(of.deltas + span.seat * of.deltas_step) + head * of.value_dim),
          decays((float*)(of.decays + span.seat * of.decays_step) + head * of.decay_dim), seen(of.value_dim),
          lacks(of.value_dim), far_query(of.key_dim), far_key(of.key_dim), decayed(of.key_dim), origin(of.decay_dim) {}

    void run() {
        const int64_t end = span.start + span.count;
        for (int64_t place = span.start; place < end; place++) {
            settle(place);
            find_path(span, place, base, path);
            const int64_t left = path.size() % grid, whole = path.size() - left;
            attend(place, whole ? ahead(whole) : state, path.data() + whole, left);
        }
        settle(end);
    }

  private:
    const Linear& of;
    const Span& span;
    const int64_t row, grid, window, head, key_head;
    int64_t base;
    float *state, *keys, *deltas, *decays;
    std::vector<float> seen, lacks, far_query, far_key, decayed, origin, drafted;
    std::vector<int64_t> path, passed;

    float* delta_at(int64_t place) { return deltas + place % window * of.heads * of.value_dim; }

    // The logarithms of the decays from the grid point until behind this place.
    float* decay_at(int64_t place) { return decays + place % window * of.heads * of.decay_dim; }

    // A key, or a query, times the decays between two places; those until the grid point are `origin`.
    void decay(const float* rows, const float* since, const float* until, std::vector<float>& decayed) {
        const int64_t size = of.key_dim;
        float* __restrict out = decayed.data();
        if (of.decay_dim == 1) {
            const float factor = exp_of(until[0] - since[0]);
            for (int64_t k = 0; k < size; k++) out[k] = rows[k] * factor;
        } else {
            for (int64_t k = 0; k < size; k++) out[k] = exp_of(until[k] - since[k]);
            for (int64_t k = 0; k < size; k++) out[k] *= rows[k];
        }
    }

    // Keys of this step are read where they are: several heads share them, and the seat gets them in the end.
    const float* key_at(int64_t place) const {
        if (place < span.start) return keys + place % window * of.key_heads * of.key_dim;
        return of.key + ((row + place - span.start) * of.key_heads + key_head) * of.key_dim;
    }

    // Brings the state to the last grid point of what is certain of the places before this one.
    void settle(int64_t place) {
        for (; base + grid <= std::min(place, span.certain); base += grid) {
            find_path(span, base + grid, base, path);
            advance(state, path.data());
        }
    }

    // The state behind so many drafted tokens of the path: rows of a chain, and most of a tree, share it.
    const float* ahead(int64_t count) {
        if (int64_t(passed.size()) > count || !std::equal(passed.begin(), passed.end(), path.begin())) passed.clear();
        if (passed.empty()) drafted.assign(state, state + of.key_dim * of.value_dim);
        for (int64_t first = passed.size(); first < count; first += grid) advance(drafted.data(), path.data() + first);
        passed.assign(path.begin(), path.begin() + count);
        return drafted.data();
    }

    // One row, behind a state and the `count` places after it.
    void attend(int64_t place, const float* state, const int64_t* places, int64_t count) {
        const int64_t at = row + place - span.start, dim = of.value_dim;
        const float* query = of.query + (at * of.key_heads + key_head) * of.key_dim;
        const float* key = key_at(place);
        const float* value = of.value + (at * of.heads + head) * dim;
        float* out = of.out + (at * of.heads + head) * dim;
        float* delta = delta_at(place);
        const float* before = count ? decay_at(places[count - 1]) : origin.data();
        float* total = decay_at(place);
        for (int64_t i = 0; i < of.decay_dim; i++) total[i] = before[i] + of.decay[(at * of.heads + head) * of.decay_dim + i];
        decay(query, origin.data(), total, far_query);
        if (of.beta) {
            decay(key, origin.data(), total, far_key);
            read<true>(state, of.key_dim, dim, far_query.data(), far_key.data(), seen.data(), lacks.data());
        } else {
            read<false>(state, of.key_dim, dim, far_query.data(), nullptr, seen.data(), nullptr);
        }
        for (int64_t other = 0; other < count; other++) {
            const float* added = delta_at(places[other]);
            const float* since = decay_at(places[other]);
            const float* known = key_at(places[other]);
            float weight = 1;
            if (of.decay_dim == 1) {
                weight = exp_of(total[0] - since[0]);
            } else {
                decay(known, since, total, decayed);
                known = decayed.data();
            }
            const float by_query = dot(query, known, of.key_dim) * weight;
            for (int64_t v = 0; v < dim; v++) seen[v] += by_query * added[v];
            if (!of.beta) continue;
            const float by_key = dot(key, known, of.key_dim) * weight;
            for (int64_t v = 0; v < dim; v++) lacks[v] += by_key * added[v];
        }
        if (of.beta) {
            const float strength = of.beta[at * of.heads + head];
            for (int64_t v = 0; v < dim; v++) delta[v] = strength * (value[v] - lacks[v]);
        } else {
            memcpy(delta, value, dim * sizeof(float));
        }
        const float own = dot(query, key, of.key_dim);
        for (int64_t v = 0; v < dim; v++) out[v] = seen[v] + own * delta[v];
    }

    // A state from a grid point to the next one, by the places between them.
    void advance(float* state, const int64_t* places) {
        const float* total = decay_at(places[grid - 1]);
        for (int64_t k = 0; k < of.key_dim; k++) {
            const float kept = exp_of(total[of.decay_dim == 1 ? 0 : k]);
            for (int64_t v = 0; v < of.value_dim; v++) state[k * of.value_dim + v] *= kept;
        }
        for (int64_t other = 0; other < grid; other++) {
            const float* delta = delta_at(places[other]);
            decay(key_at(places[other]), decay_at(places[other]), total, decayed);
            for (int64_t k = 0; k < of.key_dim; k++) {
                const float scaled = decayed[k];
                float* cells = state + k * of.value_dim;
                for (int64_t v = 0; v < of.value_dim; v++) cells[v] += scaled * delta[v];
            }
        }
    }
};

// Some heads of a sequence's selective scan. A row's state is that of the grid point with the tokens since then, one after
// the other: the same operations whether they ran in this step or are read from the window. While it is worked on, a
// state is [key_dim, heads], so that heads are computed side by side.
class Scan {
  public:
    Scan(const Linear& linear, const Spans& spans, const Span& span, int64_t row, int64_t first)
        : of(linear), span(span), row(row), grid(spans.grid), window(spans.window), first(first),
          heads(std::min(HEADS, linear.heads - first)), size(linear.key_dim), base(span.base),
          state((float*)(of.state + span.seat * of.state_step) + first * size),
          keys((float*)(of.keys + span.seat * of.keys_step)),
          deltas((float*)(of.deltas + span.seat * of.deltas_step) + first),
          times((float*)(of.decays + span.seat * of.decays_step) + first), held(size * heads), rates(size * heads) {}

    void run() {
        turn(of.rates + first * size, rates.data(), heads, size);
        turn(state, held.data(), heads, size);
        for (int64_t place = span.start; place < span.start + span.count; place++) {
            const int64_t here = row + place - span.start, inputs = here * of.heads + first, at = place % window * of.heads;
            memcpy(deltas + at, of.value + inputs, heads * sizeof(float));
            memcpy(times + at, of.decay + inputs, heads * sizeof(float));
            find_path(span, place, base, path);
            path.push_back(place);
            follow();
            read_side_by_side(of.query + here * size, of.out + inputs);
        }
    }

  private:
    const Linear& of;
    const Span& span;
    const int64_t row, grid, window, first, heads, size;
    int64_t base;
    float *state, *keys, *deltas, *times;
    std::vector<float> held, rates;
    std::vector<int64_t> path, passed;

    // Adds to what is held the tokens of the path that it lacks. What is certain at a grid point becomes the state.
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
        const float* key = place < span.start ? keys + place % window * size : of.key + (row + place - span.start) * size;
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

    // Rows become columns.
    static void turn(const float* from, float* to, int64_t num_rows, int64_t num_columns) {
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t c = 0; c < num_columns; c++) to[c * num_rows + r] = from[r * num_columns + c];
    }
};

// Calls work(span, its first row, part) for each span and each part below `parts`.
template <class Work> void for_each(const Spans& of, int64_t parts, const Work& work) {
    std::vector<int64_t> rows(of.num_spans);
    for (int64_t s = 1; s < of.num_spans; s++) rows[s] = rows[s - 1] + of.spans[s - 1].count;
    share_out(of.num_spans * parts, of.threads, of.parallel,
              [&](int64_t unit) { work(of.spans[unit / parts], rows[unit / parts], unit % parts); });
}

}  // namespace

extern "C" {

extern const int64_t tandem_sizes[] = {sizeof(Span), sizeof(Spans), sizeof(Conv), sizeof(Linear)};

void tandem_causal_conv(const Spans* spans, const Conv* conv) {
    const int64_t parts = (conv->channels + CHANNELS - 1) / CHANNELS;
    for_each(*spans, parts, [&](const Span& span, int64_t row, int64_t part) {
        auto run = conv->is_bf16 ? convolve<uint16_t> : convolve<float>;
        run(*conv, span, row, *spans, part * CHANNELS);
    });
}

void tandem_linear_attention(const Spans* spans, const Linear* linear) {
    const int64_t width = linear->key_heads * linear->key_dim;
    if (linear->rates)
        for_each(*spans, (linear->heads + HEADS - 1) / HEADS, [&](const Span& span, int64_t row, int64_t part) {
            Scan(*linear, *spans, span, row, part * HEADS).run();
        });
    else
        for_each(*spans, linear->heads, [&](const Span& span, int64_t row, int64_t head) {
            Head(*linear, *spans, span, row, head).run();
        });
    for_each(*spans, 1, [&](const Span& span, int64_t row, int64_t) {
        float* keys = (float*)(linear->keys + span.seat * linear->keys_step);
        const int64_t end = span.start + span.count;
        for (int64_t place = std::max(next_base(span, spans->grid), span.start); place < end; place++)
            memcpy(keys + place % spans->window * width, linear->key + (row + place - span.start) * width, width * sizeof(float));
    });
}

}  // extern "C"
