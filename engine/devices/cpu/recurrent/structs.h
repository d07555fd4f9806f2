// What the operators of recurrent layers are called with. structs.py has the same structs, with `Args` after their
// names.

#pragma once

#include <cstdint>

#include "../../../../native/parallel.h"

namespace {

// Packed rows of one sequence, from place `start` on. Its state is in a state_slot, and at grid point `base`; the tokens of
// the places below `certain` are its own, those behind them may be others in the next step. With `masks`, one for each
// row, they are rows of a tree: bit i is place `tree_start` + i, and the bits are the path to the row, its own the
// last.
struct Span {
    int64_t state_slot, base, start, count, certain, tree_start;
    const uint64_t* masks;
};

// Spans follow each other. A state_slot has the inputs of `window` places, each at its number modulo that.
struct Spans {
    const Span* spans;
    int64_t num_spans, grid, window, threads;
    Parallel parallel;
};

// A tensor with a part for each state_slot, `step` bytes apart.
struct SlotArray {
    char* first;
    int64_t step;

    template <class Value> Value* of(int64_t state_slot) const { return (Value*)(first + state_slot * step); }
};

// What state_slots have of a layer (state_slots.py). Its convolution's inputs, and `tail`, are bfloat16 or floats, all else is
// floats. `decay_dim` is 1 or key_dim.
struct LayerStateSlots {
    SlotArray state, tail, inputs, keys, deltas, decays;
    int64_t channels, taps, is_bf16, heads, key_heads, key_dim, value_dim, decay_dim;
};

// A convolution: floats `weight` [taps, channels], `bias` [channels] or null, `out` [rows, channels]; rows of `inputs`
// lie `input_step` values apart.
struct Conv {
    const LayerStateSlots* state_slots;
    const void* inputs;
    const float *weight, *bias;
    float* out;
    int64_t input_step;
};

// Linear attention over floats: `query`, `key` [rows, key_heads, key_dim], `value`, `out` [rows, heads, value_dim],
// `decay` [rows, heads, decay_dim], `beta` [rows, heads]; without beta there is no delta rule. With `rates` [heads,
// key_dim] it is a selective scan: key_heads, value_dim and decay_dim are 1, and `decay` is a time. Rows of queries, of
// keys and of values lie so many floats apart.
struct LinearAttention {
    const LayerStateSlots* state_slots;
    const float *query, *key, *value, *decay, *beta, *rates;
    float* out;
    int64_t query_step, key_step, value_step;
};

using CausalConv = void (*)(const Spans*, const Conv*);
using AttendLinear = void (*)(const Spans*, const LinearAttention*);

}  // namespace
