// Arguments of the operators of recurrent layers. native.py mirrors them, with `Args` after their names.

#pragma once

#include <cstdint>

#include "../../../../native/parallel.h"

namespace {

// Packed rows of one sequence, from place `start` on. Its state is in `state_slot`, at grid point `base`. Tokens at
// places below `certain` are final; later ones may change in the next step. With `masks`, one for each row, the rows
// are a tree: bit i stands for place `tree_start` + i, and the set bits are the path to the row, ending with the row
// itself.
struct Span {
    int64_t state_slot, base, start, count, certain, tree_start;
    const uint64_t* masks;
};

// Consecutive spans. A state slot has the inputs of `window` places, each at its place modulo `window`.
struct Spans {
    const Span* spans;
    int64_t num_spans, grid, window, threads;
    Parallel parallel;
};

// A tensor with a part for each state slot, `step` bytes apart.
struct SlotArray {
    char* first;
    int64_t step;

    template <class Value> Value* of(int64_t state_slot) const { return (Value*)(first + state_slot * step); }
};

// A layer's parts of the state slots (state_slots.py). The convolution's inputs and `tail` are bfloat16 or float32, all
// other parts float32. `decay_dim` is 1 or key_dim.
struct LayerStateSlots {
    SlotArray state, tail, inputs, keys, deltas, decays;
    int64_t channels, taps, is_bf16, heads, key_heads, key_dim, value_dim, decay_dim;
};

// A convolution: float32 `weight` [taps, channels], `bias` [channels] or null, `out` [rows, channels]; rows of `inputs`
// have stride `input_step`.
struct Conv {
    const LayerStateSlots* state_slots;
    const void* inputs;
    const float *weight, *bias;
    float* out;
    int64_t input_step;
};

// Linear attention in float32: `query`, `key` [rows, key_heads, key_dim], `value`, `out` [rows, heads, value_dim],
// `decay` [rows, heads, decay_dim], `beta` [rows, heads]; without beta there is no delta rule. With `rates` [heads,
// key_dim] it is a selective scan: key_heads, value_dim and decay_dim are 1, and `decay` is a time. The steps are the
// rows' strides.
struct LinearAttention {
    const LayerStateSlots* state_slots;
    const float *query, *key, *value, *decay, *beta, *rates;
    float* out;
    int64_t query_step, key_step, value_step;
};

using CausalConv = void (*)(const Spans*, const Conv*);
using AttendLinear = void (*)(const Spans*, const LinearAttention*);

}  // namespace
