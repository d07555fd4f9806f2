// A short gated convolution (LFM2, 2025). A layer's `qkv` makes three values for each channel: the gate of the
// convolution's input, the gate of its output, and the input.

#pragma once

#include <cstdint>

#include "recurrent_mixer.h"

namespace {

class ShortConvMixer : RecurrentMixer {
  public:
    explicit ShortConvMixer(Work& work) : RecurrentMixer(work) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const int64_t n = rows.count, width = layer.qkv.outputs / 3, step = layer.qkv.outputs;
        w.mixed.resize(w.room * width);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        Value* made = w.product.data();
        w.each_row(n, [&](int64_t r) { multiply_row(made + r * step, made + r * step + 2 * width, width); });
        convolve(*layer.recurrent, rows, made, step);
        w.each_row(n, [&](int64_t r) {
            gate_output(made + r * step + width, &convolved[r * width], width, &w.mixed[r * width]);
        });
        return width;
    }

  private:
    static void multiply_row(Value* __restrict product, const Value* __restrict factor, int64_t size) {
        for (int64_t i = 0; i < size; i++) product[i] = narrow(widen(product[i]) * widen(factor[i]));
    }

    static void gate_output(const Value* __restrict gate, const float* __restrict x, int64_t size,
                            Value* __restrict out) {
        for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(gate[i]) * rounded(x[i]));
    }
};

}  // namespace
