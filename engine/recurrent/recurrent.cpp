// The operators of recurrent layers on a CPU (operators.py says what they compute).
//
// A unit of work is one sequence and one head, or one block of a convolution's channels: its rows run one after the
// other, and each sum has its terms in an order that the row's position decides. So bits depend neither on chunks,
// company nor threads.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../native/parallel.h"

// Packed rows of one sequence, whose state is in a seat, from a position on.
struct Span {
    int64_t seat, start, count;
};

// Spans follow each other. Steps of seats are in bytes.
struct Spans {
    const Span* spans;
    int64_t num_spans, grid, threads;
    Parallel parallel;
};

// A convolution. `out` [rows, channels] and `weight` [taps, channels] are floats; `inputs` [rows, channels], and those of
// the seats, are floats or bfloat16.
struct Conv {
    const void* inputs;
    const float *weight, *bias;
    float* out;
    char *tail, *recent;
    int64_t tail_step, recent_step, channels, taps, is_bf16;
};

// Linear attention over floats: `query`, `key` [rows, key_heads, key_dim], `value`, `out` [rows, heads, value_dim],
// `decay`, `beta` [rows, heads]; without beta there is no delta rule.
struct Linear {
    const float *query, *key, *value, *decay, *beta;
    float* out;
    char *state, *keys, *deltas, *decays;
    int64_t state_step, keys_step, deltas_step, decays_step, heads, key_heads, key_dim, value_dim;
};

namespace {

constexpr int64_t CHANNELS = 512;
constexpr int SUMS = 16;
constexpr int64_t TILE = 64;

inline float as_float(float x) { return x; }

inline float as_float(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// One block of channels of a sequence's convolution.
template <class Word> void convolve(const Conv& conv, const Span& span, int64_t row, int64_t grid, int64_t first) {
    const int64_t channels = conv.channels, reach = conv.taps - 1, count = std::min(CHANNELS, channels - first);
    const Word* inputs = (const Word*)conv.inputs + row * channels + first;
    Word* tail = (Word*)(conv.tail + span.seat * conv.tail_step) + first;
    Word* recent = (Word*)(conv.recent + span.seat * conv.recent_step) + first;
    const int64_t origin = span.start / grid * grid, end = span.start + span.count;
    auto at = [&](int64_t position) -> const Word* {
        if (position >= span.start) return inputs + (position - span.start) * channels;
        if (position >= origin) return recent + (position - origin) * channels;
        return tail + (position - origin + reach) * channels;
    };
    for (int64_t position = span.start; position < end; position++) {
        float* out = conv.out + (row + position - span.start) * channels + first;
        for (int64_t tap = 0; tap <= reach; tap++) {
            const Word* input = at(position - reach + tap);
            const float* weight = conv.weight + tap * channels + first;
            if (tap == 0)
                for (int64_t c = 0; c < count; c++) out[c] = weight[c] * as_float(input[c]);
            else
                for (int64_t c = 0; c < count; c++) out[c] += weight[c] * as_float(input[c]);
        }
        if (conv.bias)
            for (int64_t c = 0; c < count; c++) out[c] += conv.bias[first + c];
    }
    const int64_t next = end / grid * grid;
    if (next > origin)
        for (int64_t place = 0; place < reach; place++)
            memcpy(tail + place * channels, at(next - reach + place), count * sizeof(Word));
    for (int64_t position = std::max(next, span.start); position < end; position++)
        memcpy(recent + (position - next) * channels, at(position), count * sizeof(Word));
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
    Head(const Linear& linear, const Span& span, int64_t row, int64_t grid, int64_t head)
        : of(linear), span(span), row(row), grid(grid), head(head), key_head(head / (linear.heads / linear.key_heads)),
          state((float*)(of.state + span.seat * of.state_step) + head * of.key_dim * of.value_dim),
          keys((float*)(of.keys + span.seat * of.keys_step) + key_head * of.key_dim),
          deltas((float*)(of.deltas + span.seat * of.deltas_step) + head * of.value_dim),
          decays((float*)(of.decays + span.seat * of.decays_step) + head), seen(of.value_dim), lacks(of.value_dim) {}

    void run() {
        for (int64_t position = span.start; position < span.start + span.count; position++) {
            attend(position);
            if ((position + 1) % grid == 0) advance(position);
        }
    }

  private:
    const Linear& of;
    const Span& span;
    const int64_t row, grid, head, key_head;
    float *state, *keys, *deltas, *decays;
    std::vector<float> seen, lacks;

    float* delta_at(int64_t place) { return deltas + place * of.heads * of.value_dim; }

    float& decay_at(int64_t place) { return decays[place * of.heads]; }

    // Keys of this step are read where they are: several heads share them, and the seat gets them in the end.
    const float* key_at(int64_t position) const {
        if (position < span.start) return keys + position % grid * of.key_heads * of.key_dim;
        return of.key + ((row + position - span.start) * of.key_heads + key_head) * of.key_dim;
    }

    void attend(int64_t position) {
        const int64_t at = row + position - span.start, place = position % grid, dim = of.value_dim;
        const float* query = of.query + (at * of.key_heads + key_head) * of.key_dim;
        const float* key = key_at(position);
        const float* value = of.value + (at * of.heads + head) * dim;
        float* out = of.out + (at * of.heads + head) * dim;
        float* delta = delta_at(place);
        const float total = of.decay[at * of.heads + head] + (place ? decay_at(place - 1) : 0);
        const float kept = std::exp(total);
        if (of.beta)
            read<true>(state, of.key_dim, dim, query, key, seen.data(), lacks.data());
        else
            read<false>(state, of.key_dim, dim, query, key, seen.data(), lacks.data());
        for (int64_t v = 0; v < dim; v++) seen[v] *= kept;
        if (of.beta)
            for (int64_t v = 0; v < dim; v++) lacks[v] *= kept;
        for (int64_t other = 0; other < place; other++) {
            const float* known = key_at(position - place + other);
            const float* added = delta_at(other);
            const float weight = std::exp(total - decay_at(other));
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
        decay_at(place) = total;
        const float own = dot(query, key, of.key_dim);
        for (int64_t v = 0; v < dim; v++) out[v] = seen[v] + own * delta[v];
    }

    // To the state at the grid point behind `position`.
    void advance(int64_t position) {
        const float total = decay_at(grid - 1), kept = std::exp(total);
        for (int64_t i = 0; i < of.key_dim * of.value_dim; i++) state[i] *= kept;
        for (int64_t place = 0; place < grid; place++) {
            const float* key = key_at(position - grid + 1 + place);
            const float* delta = delta_at(place);
            const float weight = std::exp(total - decay_at(place));
            for (int64_t k = 0; k < of.key_dim; k++) {
                const float scaled = key[k] * weight;
                float* cells = state + k * of.value_dim;
                for (int64_t v = 0; v < of.value_dim; v++) cells[v] += scaled * delta[v];
            }
        }
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

extern const int64_t tandem_sizes[] = {sizeof(Spans), sizeof(Conv), sizeof(Linear)};

void tandem_causal_conv(const Spans* spans, const Conv* conv) {
    const int64_t parts = (conv->channels + CHANNELS - 1) / CHANNELS;
    for_each(*spans, parts, [&](const Span& span, int64_t row, int64_t part) {
        auto run = conv->is_bf16 ? convolve<uint16_t> : convolve<float>;
        run(*conv, span, row, spans->grid, part * CHANNELS);
    });
}

void tandem_linear_attention(const Spans* spans, const Linear* linear) {
    const int64_t grid = spans->grid, width = linear->key_heads * linear->key_dim;
    for_each(*spans, linear->heads, [&](const Span& span, int64_t row, int64_t head) {
        Head(*linear, span, row, grid, head).run();
    });
    for_each(*spans, 1, [&](const Span& span, int64_t row, int64_t) {
        float* keys = (float*)(linear->keys + span.seat * linear->keys_step);
        const int64_t end = span.start + span.count;
        for (int64_t position = std::max(end / grid * grid, span.start); position < end; position++)
            memcpy(keys + position % grid * width, linear->key + (row + position - span.start) * width, width * sizeof(float));
    });
}

}  // extern "C"
