// The operators of recurrent layers on a CPU (operators.py defines what they compute).
//
// A unit of work is one sequence and one head, or one block of a convolution's channels. Its rows run one after the
// other, and a row's position determines the order of each sum's terms. So bits depend on neither chunks, nor other
// rows, nor threads. Nor do they depend on drafts: a state only ever contains certain tokens, and the window places
// that drafts have written are written again before they are read.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "linear_attention.h"
#include "path.h"
#include "selective_scan.h"
#include "structs.h"

namespace {

constexpr int64_t CHANNELS = 512;

// Treats denormal numbers as zero in its scope: strong decays leave some, each costing Intel's CPUs a hundred cycles.
class NoDenormals {
#ifdef __SSE__
    static constexpr unsigned FLUSH_AND_READ_AS_ZERO = 0x8040;
    const unsigned before = _mm_getcsr();

  public:
    NoDenormals() { _mm_setcsr(before | FLUSH_AND_READ_AS_ZERO); }
    ~NoDenormals() { _mm_setcsr(before); }
#endif
};

inline float as_float(float x) { return x; }

inline float as_float(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Runs one block of channels of a sequence's convolution.
template <class Word> void convolve(const Conv& conv, const Span& span, int64_t row, const Spans& of, int64_t first) {
    const LayerStateSlots& state_slots = *conv.state_slots;
    const int64_t channels = state_slots.channels, reach = state_slots.taps - 1, count = std::min(CHANNELS, channels - first);
    const Word* inputs = (const Word*)conv.inputs + row * conv.input_step + first;
    Word* tail = state_slots.tail.of<Word>(span.state_slot) + first;
    Word* recent = state_slots.inputs.of<Word>(span.state_slot) + first;
    const int64_t end = span.start + span.count;
    auto at = [&](int64_t place) -> const Word* {
        if (place >= span.start) return inputs + (place - span.start) * conv.input_step;
        if (place >= span.base) return recent + place % of.window * channels;
        return tail + (place - span.base + reach) * channels;
    };
    std::vector<int64_t> path;
    for (int64_t place = span.start; place < end; place++) {
        find_path(span, place, (span.masks ? span.tree_start : place) - reach, path);
        path.push_back(place);
        const int64_t* places = path.data() + path.size() - state_slots.taps;
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

// Calls work(span, first row of the span, part) for each span and each part below `parts`.
template <class Work> void for_each(const Spans& of, int64_t parts, const Work& work) {
    std::vector<int64_t> rows(of.num_spans);
    for (int64_t s = 1; s < of.num_spans; s++) rows[s] = rows[s - 1] + of.spans[s - 1].count;
    share_out(of.num_spans * parts, of.threads, of.parallel,
              [&](int64_t unit) { work(of.spans[unit / parts], rows[unit / parts], unit % parts); });
}

}  // namespace

extern "C" {

void tandem_causal_conv(const Spans* spans, const Conv* conv) {
    const int64_t parts = (conv->state_slots->channels + CHANNELS - 1) / CHANNELS;
    for_each(*spans, parts, [&](const Span& span, int64_t row, int64_t part) {
        auto run = conv->state_slots->is_bf16 ? convolve<uint16_t> : convolve<float>;
        run(*conv, span, row, *spans, part * CHANNELS);
    });
}

void tandem_linear_attention(const Spans* spans, const LinearAttention* linear) {
    const LayerStateSlots& state_slots = *linear->state_slots;
    const int64_t width = state_slots.key_heads * state_slots.key_dim;
    if (linear->rates)
        for_each(*spans, (state_slots.heads + HEADS - 1) / HEADS, [&](const Span& span, int64_t row, int64_t part) {
            const NoDenormals no_denormals{};
            Scan(*linear, *spans, span, row, part * HEADS).run();
        });
    else
        for_each(*spans, state_slots.heads, [&](const Span& span, int64_t row, int64_t head) {
            static thread_local Scratch scratch;
            const NoDenormals no_denormals{};
            Head(*linear, *spans, span, row, head, scratch).run();
        });
    for_each(*spans, 1, [&](const Span& span, int64_t row, int64_t) {
        float* keys = state_slots.keys.of<float>(span.state_slot);
        const int64_t end = span.start + span.count;
        for (int64_t place = std::max(next_base(span, spans->grid), span.start); place < end; place++)
            memcpy(keys + place % spans->window * width, linear->key + (row + place - span.start) * linear->key_step,
                   width * sizeof(float));
    });
}

}  // extern "C"
