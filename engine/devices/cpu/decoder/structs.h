// What the decoder is made of and called with. structs.py has the same structs, with `Args` after their names.

#pragma once

#include <cstdint>

#include "../../../../native/parallel.h"
#include "../attention/step.h"
#include "../../../linear/routed_rows.h"
#include "../../../lora/adapt.h"
#include "../recurrent/structs.h"
#include "value.h"

namespace {

using Linear = void (*)(const Value*, const Value*, const Value*, Value*, int64_t, int64_t, int64_t, int64_t, Parallel);
using QuantizedLinear = void (*)(const Value*, const void*, Value*, int64_t, int64_t, Parallel);
using Routed = RoutedRows<Value>;
using RoutedLinear = void (*)(const Routed*, const Value*, const Value*, int64_t, Parallel);
using RoutedQuantizedLinear = void (*)(const Routed*, const void*, int64_t, int64_t, int64_t, Parallel);
using BeginAttention = const char* (*)(void*, const Step*);
using Attend = void (*)(void*, const Call*);
// Makes rows whole of which each rank has some: `own` of their `width` bytes, from `first` on.
using Gather = bool (*)(void* ranks, const Value* part, Value* whole, int64_t rows, int64_t first, int64_t own, int64_t width);

// One product's packed weights, [out, in], and bias (null for none), or the quantized product's struct.
struct Weights {
    const Value *values, *bias;
    const void* quantized;
    int64_t in, out;
    int64_t first;  // of a rank, whose weights have some of the outputs: where what it makes of them begins in a whole row
    const float* multipliers;  // of its outputs, [out]; null for none

    explicit operator bool() const { return values || quantized; }
};

// What mixes a layer's rows; each has a header that says what a layer's `qkv` makes for it.
enum Mixer : int64_t { ATTENTION, DELTA, SHORT_CONV, STATE_SPACE, NOTHING, CHANNEL_DELTA, LATENT };

// What a mixer with a state has beside its layer's products, null where it has none.
struct Recurrent {
    int64_t number, group;                // among recurrent layers; how many values are normed together
    int64_t interleaved;                  // whether products' outputs lie key head by key head
    const float *taps, *bias;             // of its convolution, [taps, channels], [channels]
    const float *rates, *shifts, *skips;  // [heads]; with decays of channels `shifts` are [heads, key_dim]
    float shortest, longest;              // of times
    const Value* norm;
    int64_t norms_first;                  // whether outputs are normed before they are opened
    Weights gates;
    Weights decays, opening;  // of low rank: they make these of the last that `gates` makes
};

// What latent attention has beside its layer's products.
struct Latent {
    Weights queries;  // of what `qkv` makes, past a norm; none: `qkv` makes the heads' queries
    const Weights *to_latent, *to_value;  // of each head
    double norm_epsilon;
};

// One product's packed weights of all experts of a layer, one expert's behind the other's.
struct ExpertWeights {
    const Value *values, *bias;
    const void* quantized;  // the first expert's, of which a panel has so many `words` and `scales`
    int64_t words, scales;
    int64_t in, out;
};

// A layer's experts, of which each row goes through those that its router scores highest.
struct Experts {
    int64_t count, chosen;
    int64_t score;               // one of `Score`
    Weights router;              // makes logits in bfloat16; or
    const float* exact_router;   // [count, hidden], makes them in float32
    const float* preferences;    // [count], null for none: added to scores only to find the highest
    int64_t groups, open_groups; // experts are chosen only from the groups with the highest scores
    int64_t normalizes;          // whether the chosen scores sum up to 1,
    float least_sum, scaling;    // then are scaled,
    int64_t rounds;              // and rounded to bfloat16
    ExpertWeights first, second;
    Weights opener;              // makes what opens the output of the layer's MLP; null: it is open
};

// Rows are mixed, and each then goes through an MLP, through experts or through both side by side; or only the one or
// the other, and what there is not is null. Where two mixers read the same rows and their outputs are added, the second
// is a layer of its own without an MLP.
struct Layer {
    int64_t mixer;
    const Value *input_norm, *query_norm, *key_norm, *mlp_norm;  // null where there is none
    const Value *mixed_norm, *made_norm;  // of what is added to the residual: the mixer's output and the MLP's
    const Value *cosines, *sines;         // [positions, rotary_dim]
    Weights qkv, output, gate_up, down;
    int64_t window;
    const Recurrent* recurrent;  // null for attention
    const Latent* latent;        // null but for latent attention
    const Experts* experts;
    int64_t beside;              // the number of the layer with the second mixer; 0 for none
    double input_multiplier;     // of what its mixer reads; 0 for none
};

// The input of a draft head of one layer: a token and the hidden state before it, both normed but for EAGLE-1. Either
// they are concatenated for the layer's products, and the hidden state is the residual (EAGLE-3); or the product
// `joint` makes one vector of the two.
struct Entry {
    const Value *token_norm, *hidden_norm;  // null: not normed
    Weights joint, mixing;             // `mixing` makes the head's hidden states from the target's; null: they are equal
    int64_t normed_goes_on, feeds_normed;  // whether the residual, and the next row's hidden state, is the normed one
    const int64_t* token_ids;              // the token of each of the head's logits; null: the logit's index
};

struct Model {
    const Layer* layers;  // first those that follow each other, then second mixers
    int64_t num_layers, num_beside, hidden, num_heads, head_dim, vocab, products;  // of a rank: its own heads and products
    const Value *embeddings, *final_norm;
    Weights head;
    int64_t rotary_dim;           // the first of each head are rotated
    int64_t opens_heads;          // whether beside each head's query lies what opens its output
    int64_t norms;                // one of `Norm`
    int64_t activation;           // one of `Activation`
    double norm_epsilon, attention_scale;
    double embedding_multiplier, residual_multiplier, logits_scaling;  // Granite's; 0 for none
    void* const* attention;    // of each block table
    const int64_t* tables;     // the block table of each layer
    int64_t num_tables;
    Linear linear;
    QuantizedLinear quantized_linear;
    RoutedLinear routed_linear;
    RoutedQuantizedLinear routed_quantized_linear;
    BeginAttention begin;
    Attend attend;
    Parallel parallel;
    const Entry* entry;  // null for a whole model
    Gather gather;       // of a rank; it does nothing once a rank is lost
    void* ranks;
    Adapt<Value> adapt;
    const LayerStateSlots* state_slots;  // of each recurrent layer; null where there is none
    CausalConv convolve;
    AttendLinear attend_linear;
};

// Where a layer's parts of an adapter begin: those of the mixer's input, of its gates and of its
// output, of the gate and what it opens, of the way down, and of what opens an MLP beside experts.
enum Product : int64_t { QKV = 0, GATES = 3, OUTPUT = 5, GATE_UP = 6, DOWN = 8, OPENER = 9, PARTS = 10 };

struct Rows {
    const int64_t *token_ids, *positions;
    int64_t count;
    const int64_t* logit_rows;  // null: all
    int64_t num_logits;
    Value* logits;  // [num_logits, vocab]
    const int64_t* hidden_layers;  // whose hidden states are wanted, ascending: 0 the embeddings, i after layer i
    int64_t num_hidden;
    Value* hidden;  // [count, num_hidden, hidden]
    const Value* before;  // for a head, [count, hidden]: the hidden states before the tokens
    Value* after;         // out, [num_logits, hidden]: the hidden states for the next rows; may be `before`
    const int32_t* owners;         // of each row, the number of its adapter; -1: it has none
    const Part* const* adapters;  // of each, its parts: PARTS of every layer
    int64_t num_adapters;
    const Spans* spans;  // for recurrent layers
};

// Rows without trees: of each sequence the positions [starts, ends). Their KV is written to its blocks.
struct Batch {
    int64_t num_sequences, table_stride, block_size;
    const int64_t *token_ids, *starts, *ends;  // one sequence after the other
    const int32_t* block_table;                // [tables, sequences, table_stride]
    const int32_t* first_key;                  // keys before `first_key` are not read; may be null

    // The name of the field that is out of range, or null.
    const char* fault() const {
        for (int64_t s = 0; s < num_sequences; s++) {
            if (starts[s] < 0 || starts[s] >= ends[s]) return "starts";
            if (ends[s] > table_stride * block_size) return "block_table";
        }
        return nullptr;
    }

    const int32_t* table(int64_t number) const { return block_table + number * num_sequences * table_stride; }

    int64_t slot(int64_t number, int64_t s, int64_t place) const {
        return table(number)[s * table_stride + place / block_size] * block_size + place % block_size;
    }
};

// Drafts token by token. No sequence wants more tokens than the one before it. The batch's rows, whose draft KV is not
// there yet, are run first.
struct Draft {
    Batch batch;
    int64_t vocab;              // how many of the logits are used
    const int64_t* counts;      // tokens to draft
    const int64_t* seeds;
    const float* temperatures;  // 0: the likeliest token
    const Value* before;         // for a head, [rows, mixing.in or hidden]: the target's hidden states before them
    int64_t* drafted;           // [counts[0], num_sequences]
    // out, [num_sequences, counts[0], width]: the distributions that tokens are drawn from, with noise of their own.
    // Null: tokens are chosen with the target's noise.
    float* distributions;
    int64_t width;
};

}  // namespace
