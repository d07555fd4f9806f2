// Base of all mixers with states.

#pragma once

#include <cstdint>
#include <vector>

#include "work.h"

namespace {

class RecurrentMixer {
  protected:
    explicit RecurrentMixer(Work& work) : w(work), m(work.m) {}

    // Fills `convolved` from inputs whose rows have stride `step`.
    void convolve(const Recurrent& layer, const Rows& rows, const Value* inputs, int64_t step) {
        const LayerStateSlots& of = m.state_slots[layer.number];
        convolved.resize(rows.count * of.channels);
        const Spans spans = spans_of(rows, rows.count < SERIAL_ROWS ? 1 : w.threads);
        const Conv conv{&of, inputs, layer.taps, layer.bias, convolved.data(), step};
        m.convolve(&spans, &conv);
    }

    void attend(const Rows& rows, const LinearAttention& linear) {
        const Spans spans = spans_of(rows, w.threads);
        m.attend_linear(&spans, &linear);
    }

    Work& w;
    const Model& m;
    std::vector<float> convolved;  // [rows, channels]

  private:
    Spans spans_of(const Rows& rows, int64_t threads) const {
        Spans spans = *rows.spans;
        spans.threads = threads, spans.parallel = m.parallel;
        return spans;
    }
};

}  // namespace
