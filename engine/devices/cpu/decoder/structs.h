// The decoder's model and arguments. native_model.py mirrors them, with `Args` after their names.

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
using QuantizedRows = void (*)(const void*, const int64_t*, int64_t, Value*);
using Routed = RoutedRows<Value>;
using RoutedLinear = void (*)(const Routed*, const Value*, const Value*, int64_t, Parallel);
using RoutedQuantizedLinear = void (*)(const Routed*, const void*, int64_t, int64_t, int64_t, Parallel);
using BeginAttention = const char* (*)(void*, const Step*);
using Attend = void (*)(void*, const Call*);
// Assembles whole rows from the ranks' parts. This rank has `own` of the `width` bytes of a row, from `first` on.
using Gather = bool (*)(void* ranks, const Value* part, Value* whole, int64_t rows, int64_t first, int64_t own, int64_t width);

// A product's packed weights, [outputs, inputs], and bias (null for none), or the quantized product's struct.
struct Weights {
    const Value *values, *bias;
    const void* quantized;
    int64_t inputs, outputs;
    int64_t first;  // a rank's offset in a whole row, if its weights have only some of the outputs
    const float* multipliers;  // factors of the outputs; null for none

    explicit operator bool() const { return values || quantized; }
};

// The mixer of a layer's rows. Each mixer's header says what a layer's `qkv` makes for it.
enum Mixer : int64_t { ATTENTION, DELTA, SHORT_CONV, STATE_SPACE, NOTHING, CHANNEL_DELTA, LATENT };

// A recurrent mixer's data in addition to its layer's products; null where it has none.
struct Recurrent {
    int64_t number, group;                // index among recurrent layers; number of values normed together
    int64_t interleaved;                  // whether products' outputs are ordered by key head
    const float *taps, *bias;             // the convolution's weights [taps, channels] and bias [channels]
    const float *rates, *shifts, *skips;  // [heads]; for decays by channel, `shifts` are [heads, key_dim]
    float shortest, longest;              // limits of times
    const Value* norm;
    int64_t norms_first;                  // whether outputs are normed before they are gated
    Weights gates;
    Weights decays, opening;  // low-rank weights: make decays and output gates from the last outputs of `gates`
};

// Latent attention's data in addition to its layer's products.
struct Latent {
    Weights queries;  // makes queries from the normed first values of `qkv`; none if `qkv` makes the heads' queries
    const Weights *to_latent, *to_value;  // for each head
    double norm_epsilon;
    int64_t in_pairs;  // whether values that are rotated together are neighbours
};

// A product's packed weights of all experts of a layer, expert after expert.
struct ExpertWeights {
    const Value *values, *bias;
    const void* quantized;  // the first expert's struct; a panel has `words` words and `scales` scales
    int64_t words, scales;
    int64_t inputs, outputs;
};

// A layer's experts. Each row goes through the experts that its router scores highest.
struct Experts {
    int64_t count, chosen;
    int64_t score;               // one of `Score`
    Weights router;              // makes logits in bfloat16, or else
    const float* exact_router;   // [count, hidden], makes them in float32
    const float* preferences;    // [count], added to scores only to find the highest; null for none
    int64_t groups, open_groups; // experts are selected only from the `open_groups` groups with the highest scores
    int64_t normalizes;          // whether the selected scores are divided by their sum,
    float least_sum, scaling;    // then scaled,
    int64_t rounds;              // and rounded to bfloat16
    ExpertWeights first, second;
    Weights shared_gate;         // makes the gate of the layer's MLP; null: not gated
};

// A mixer, followed by an MLP, by experts or by both in parallel; or only a mixer, or only MLP and experts. Missing
// parts are null. If two mixers read the same rows and their outputs are added, the second is a layer of its own
// without an MLP.
struct Layer {
    int64_t mixer;
    const Value *input_norm, *query_norm, *key_norm, *mlp_norm;  // null if missing
    const Value *mixed_norm, *made_norm;  // norms before the residual addition: for the mixer's output and the MLP's
    const Value *cosines, *sines;         // [positions, rotary_dim]
    Weights qkv, output, gate_up, down;
    int64_t window;
    const float* sinks;          // attention sinks [heads]; null for none
    const Recurrent* recurrent;  // null for attention
    const Latent* latent;        // null except for latent attention
    const Experts* experts;
    int64_t beside;              // the number of the layer with the second mixer; 0 for none
    double input_multiplier;     // factor of the mixer's input; 0 for none
};

// The input of a one-layer draft head: a token's embedding and the previous hidden state, both normed except in
// EAGLE-1. They are concatenated for the layer's products, and the hidden state is the residual (EAGLE-3); or the
// product `joint` makes one vector of the two.
struct HeadInput {
    const Value *token_norm, *hidden_norm;  // null: not normed
    Weights joint, mixing;             // `mixing` makes the head's hidden states from the target's; null: equal
    int64_t normed_goes_on, feeds_normed;  // whether the residual, and the next row's hidden state, is the normed one
    const int64_t* token_ids;              // the token of each of the head's logits; null: the logit's index
};

struct Model {
    const Layer* layers;  // first the consecutive layers, then second mixers
    int64_t num_layers, num_beside, hidden, num_heads, head_dim, vocab, products;  // for a rank: its own
    const Value *embeddings, *final_norm;
    const void* coded_embeddings;  // the quantized product's struct with the embeddings, if `embeddings` is null
    Weights head;
    int64_t rotary_dim;           // rotated dims, the first of each head
    int64_t opens_heads;          // whether each head's query is followed by its output gate
    int64_t norms;                // one of `Norm`
    int64_t activation;           // one of `Activation`
    double norm_epsilon, attention_scale;
    double embedding_multiplier, residual_multiplier, logits_scaling;  // Granite's; 0 for none
    void* const* attention;    // for each block table
    const int64_t* tables;     // the block table of each layer
    int64_t num_tables;
    Linear linear;
    QuantizedLinear quantized_linear;
    QuantizedRows quantized_rows;
    RoutedLinear routed_linear;
    RoutedQuantizedLinear routed_quantized_linear;
    BeginAttention begin;
    Attend attend;
    Parallel parallel;
    const HeadInput* entry;  // null for a whole model
    Gather gather;           // for a rank; does nothing once a rank is lost
    void* ranks;
    Adapt<Value> adapt;
    const LayerStateSlots* state_slots;  // for each recurrent layer; null without any
    CausalConv convolve;
    AttendLinear attend_linear;
};

// The offsets of a layer's parts of an adapter, by product: the mixer's input, its gates, its output, the MLP's gate
// and up product, its down product, and the gate of an MLP next to experts.
enum Product : int64_t { QKV = 0, GATES = 3, OUTPUT = 5, GATE_UP = 6, DOWN = 8, SHARED_GATE = 9, PARTS = 10 };

struct Rows {
    const int64_t *token_ids, *positions;
    int64_t count;
    const int64_t* logit_rows;  // null: all
    int64_t num_logits;
    Value* logits;  // [num_logits, vocab]
    const int64_t* hidden_layers;  // the layers to capture, ascending: 0 for the embeddings, i for layer i's output
    int64_t num_hidden;
    Value* hidden;  // [count, num_hidden, hidden]
    const Value* before;  // for a draft head, [count, hidden]: the hidden states before the tokens
    Value* after;         // out, [num_logits, hidden]: the hidden states for the next rows; may be `before`
    const int32_t* owners;         // each row's adapter number; -1 for none
    const Part* const* adapters;  // each adapter's parts: PARTS for every layer
    int64_t num_adapters;
    const Spans* spans;  // for recurrent layers
};

// Rows without trees: each sequence's positions [starts, ends). Their KV is written to its blocks.
struct Batch {
    int64_t num_sequences, table_stride, block_size;
    const int64_t *token_ids, *starts, *ends;  // sequence after sequence
    const int32_t* block_table;                // [tables, sequences, table_stride]
    const int32_t* first_key;                  // keys before `first_key` are not read; may be null

    // Returns the name of the field that is out of range, or null.
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

// Drafts token by token. `counts` must not increase from one sequence to the next. The batch's rows, whose draft KV is
// missing, are run first.
struct Draft {
    Batch batch;
    int64_t vocab;              // number of logits to use
    const int64_t* counts;      // tokens to draft
    const int64_t* seeds;
    const float* temperatures;  // 0: the likeliest token
    const Value* before;         // for a head, [rows, mixing.inputs or hidden]: the target's hidden states before them
    int64_t* drafted;           // [counts[0], num_sequences]
    // out, [num_sequences, counts[0], width]: the distributions from which tokens are drawn, with their own noise.
    // Null: tokens are drawn with the target's noise.
    float* distributions;
    int64_t width;
};

}  // namespace
