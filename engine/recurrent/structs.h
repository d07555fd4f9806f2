// What Python hands to the operators of recurrent layers (structs.py).
#pragma once

#include <cstdint>

#include "../../native/parallel.h"

// Packed rows of one sequence, from place `start` on. Its state is in a seat, and at grid point `base`; the tokens of
// the places below `certain` are its own, those behind them may be others in the next step. With `masks`, one for each
// row, they are rows of a tree: bit i is place `tree_start` + i, and the bits are the path to the row, its own the last.
struct Span {
    int64_t seat, base, start, count, certain, tree_start;
    const uint64_t* masks;
};

// Spans follow each other. A seat has the inputs of `window` places, each at its number modulo that. Steps of seats are
// in bytes.
struct Spans {
    const Span* spans;
    int64_t num_spans, grid, window, threads;
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
// `decay` [rows, heads, decay_dim], `beta` [rows, heads]; without beta there is no delta rule. `decay_dim` is 1 or key_dim.
// With `rates` [heads, key_dim] it is a selective scan: key_heads, value_dim and decay_dim are 1, and `decay` is a time.
struct Linear {
    const float *query, *key, *value, *decay, *beta, *rates;
    float* out;
    char *state, *keys, *deltas, *decays;
    int64_t state_step, keys_step, deltas_step, decays_step, heads, key_heads, key_dim, value_dim, decay_dim;
};
