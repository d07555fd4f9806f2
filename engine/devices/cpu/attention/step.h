// The kernel's arguments: a KV pool, a step and a layer's call. The decoder and Python (backend.py) fill them in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../../native/parallel.h"
#include "sight.h"

// The form in which keys and values are stored: as the model computes them, or as codes (codes.h).
enum Stored : int64_t { PLAIN, INT8, FP8 };

// A layer's KV: pointers to the first block's keys and values, and the strides between tokens, in elements. An element
// is a value, or a byte if codes are stored. A token's heads are contiguous. If `keys` and `values` are equal, values
// are the leading part of each row of keys. Codes have scales, contiguous for a token's heads, with the rows' strides
// in bytes.
struct KvLayer {
    void *keys, *values;
    float *key_scales, *value_scales;  // or null
    int64_t key_stride, value_stride, num_kv_heads, key_dim, value_dim;
};

struct Pool {
    const KvLayer* layers;
    int64_t num_layers;
    int64_t block_stride;  // in elements, for every layer
    int64_t num_blocks, block_size;
    int64_t is_bf16;  // dtype that the model computes: bfloat16, or else float32
    int64_t stored;   // one of `Stored`
};

// The step's metadata, described at AttentionMetadata.
struct Step {
    const int32_t *query_start, *context_len, *block_table;
    const int64_t* slots;
    const uint64_t* visible;                // null if all sequences are chains
    const int32_t *tree_start, *first_key;  // may be null
    int64_t table_stride, num_sequences, total_tokens, threads;
    Parallel parallel;  // or null

    int query_len(int64_t s) const { return query_start[s + 1] - query_start[s]; }
    int64_t first_position(int64_t s) const { return context_len[s] - query_len(s); }
    int32_t block(int64_t s, int64_t index) const { return block_table[s * table_stride + index]; }

    bool is_tree(int64_t s) const { return visible && tree_start[s] >= 0; }

    // Returns the first key that a row at this position sees, with a sliding window or none (0).
    int64_t first_seen(int64_t s, int64_t position, int64_t window) const {
        const int64_t lowest = first_key ? first_key[s] : 0;
        return window ? std::max(lowest, position + 1 - window) : lowest;
    }

    // Returns a lower bound of the keys that query rows from row q on see.
    int64_t first_seen_from(int64_t s, int q, int64_t window) const {
        return first_seen(s, is_tree(s) ? tree_start[s] : first_position(s) + q, window);
    }

    // Returns a mask in which bit i says whether row q of a tree sees row i. The row's own bit is the highest.
    uint64_t path(int64_t s, int q) const { return visible[query_start[s] + q]; }

    Sight sight(int64_t s, int q, int64_t window) const {
        const int64_t depth = is_tree(s) ? __builtin_popcountll(path(s, q)) - 1 : 0;
        const int64_t position = is_tree(s) ? tree_start[s] + depth : first_position(s) + q;
        return {first_seen(s, position, window), position + 1};
    }

    // Returns the name of the field that is out of range, or null.
    const char* fault(const Pool& pool) const {
        for (int64_t s = 0; s < num_sequences; s++) {
            if (query_start[s] < 0 || query_len(s) < 0 || query_start[s + 1] > total_tokens)
                return "query_start";
            if (first_position(s) < 0 || context_len[s] > table_stride * pool.block_size)
                return "context_len";
            for (int64_t b = 0; b * pool.block_size < context_len[s]; b++)
                if (block(s, b) < 0 || block(s, b) >= pool.num_blocks) return "block_table";
            if (first_key && (first_key[s] < 0 || first_key[s] > first_position(s))) return "first_key";
            if (!is_tree(s)) continue;
            if (tree_start[s] > first_position(s) || tree_start[s] < first_seen(s, 0, 0)) return "tree_start";
            if (!paths_fit(s)) return "visible";
        }
        for (int64_t t = 0; t < total_tokens; t++)
            if (slots[t] >= pool.num_blocks * pool.block_size) return "slot_mapping";
        return nullptr;
    }

  private:
    // Returns whether every row sees itself and no later row.
    bool paths_fit(int64_t s) const {
        for (int q = 0; q < query_len(s); q++) {
            const int64_t own = first_position(s) + q - tree_start[s];
            if (own > 63 || path(s, q) >> own != 1) return false;
        }
        return true;
    }
};

// A layer's tensors, with strides in elements.
struct Call {
    const void *query, *key, *value;
    void* out;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    int64_t layer, num_heads, window;
    double scale, softcap;
    const float* sinks;  // a score for each head of an additional key whose value is zero; or null
};
