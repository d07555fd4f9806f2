// What the decoder is made of and called with. structs.py has the same structs, with `Args` after their names.

#pragma once

#include <cstdint>

#include "../../native/parallel.h"
#include "../attention/cpu_kernel/step.h"
#include "../sampler/choice.h"

namespace {

using Linear = void (*)(const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t, Parallel);
using BeginAttention = const char* (*)(void*, const Step*);
using Attend = void (*)(void*, const Call*);

// One product's packed weights, [out, in], and bias (null for none).
struct Weights {
    const bf16 *values, *bias;
    int64_t in, out;
};

struct Layer {
    const bf16 *input_norm, *query_norm, *key_norm, *mlp_norm;  // of heads: null for none
    Weights qkv, output, gate_up, down;
    int64_t window;
};

// How a draft head of one layer begins: with pairs of a token and the hidden state before it (EAGLE). Either both
// are normed, joined for the layer's products, and the hidden state goes on beside it, or `joint` makes one of them.
struct Entry {
    const bf16 *token_norm, *hidden_norm;  // null: `joint` is there
    Weights joint, mixing;             // the latter makes hidden states of the target's, for drafts; null: they are
    int64_t normed_goes_on, feeds_normed;  // what goes on beside the layer, and into the next row: after its norm?
    const int64_t* token_ids;              // those of the head's logits; null: all in order
};

struct Model {
    const Layer* layers;
    int64_t num_layers, hidden, num_heads, head_dim, vocab, threads, products;
    const bf16 *embeddings, *final_norm;
    Weights head;
    const bf16 *cosines, *sines;  // [positions, head_dim]
    double norm_epsilon, attention_scale;
    void* attention;
    Linear linear;
    BeginAttention begin;
    Attend attend;
    Parallel parallel;
    const Entry* entry;  // null for a whole model
};

struct Rows {
    const int64_t *token_ids, *positions;
    int64_t count;
    const int64_t* logit_rows;  // null: all
    int64_t num_logits;
    bf16* logits;  // [num_logits, vocab]
    const int64_t* hidden_layers;  // whose hidden states are wanted, ascending: 0 the embeddings, i after layer i
    int64_t num_hidden;
    bf16* hidden;  // [count, num_hidden, hidden]
    const bf16* before;  // for a head, [count, hidden]: the hidden states before the tokens
    bf16* after;         // and [num_logits, hidden]: those for the rows after them; may be `before`
};

// Rows of chains: for each sequence those from place `starts` up to `ends`, whose KV goes to its blocks.
struct Batch {
    int64_t num_sequences, table_stride, block_size;
    const int64_t *token_ids, *starts, *ends;  // one sequence after the other
    const int32_t *block_table, *first_key;    // no keys before the latter are looked at; may be null

    // The name of the field that is out of range, or null.
    const char* fault() const {
        for (int64_t s = 0; s < num_sequences; s++) {
            if (starts[s] < 0 || starts[s] >= ends[s]) return "starts";
            if (ends[s] > table_stride * block_size) return "block_table";
        }
        return nullptr;
    }

    int64_t slot(int64_t s, int64_t place) const {
        return block_table[s * table_stride + place / block_size] * block_size + place % block_size;
    }
};

// Drafting one token after the other, for sequences of which each wants no more of them than the one before. First
// the batch's rows are read, which no one has run yet.
struct Draft {
    Batch batch;
    int64_t vocab;              // only so many of the logits count
    const int64_t* counts;      // of tokens wanted
    const int64_t* seeds;
    const float* temperatures;  // 0: the likeliest token
    const bf16* before;         // for a head, [rows, mixing.in or hidden]: what was before those to be read
    int64_t* drafted;           // [counts[0], num_sequences]
    // [num_sequences, counts[0], width]: what tokens are drawn from, with noise of their own; null: they are chosen
    // with the target's noise
    float* distributions;
    int64_t width;
};

}  // namespace
