// Latent attention (MLA, DeepSeek-V2, 2024), absorbed (engine/devices/torch/latent_attention.py). A
// layer's `qkv` makes the heads' queries, or a short vector from which, normed, `queries` makes them; then a token's
// latent, which is normed too, and the part of the key that all heads share, which is rotated, as is the equal part of
// each query. Latent and shared part are the one key; the latent is its value.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "work.h"

namespace {

class LatentMixer {
  public:
    explicit LatentMixer(Work& work) : w(work), m(work.m) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const Latent& of = *layer.latent;
        const int64_t n = rows.count, heads = m.num_heads, latent = of.to_latent->outputs;
        const int64_t own = of.to_latent->inputs, shared = m.head_dim - own;  // parts of a query
        const int64_t made = layer.qkv.outputs, before = made - latent - shared, key_dim = latent + shared;
        const int64_t value_dim = of.to_value->outputs, width = heads * value_dim;
        w.mixed.resize(w.room * width), queries.resize(n * heads * key_dim), attended.resize(n * heads * latent);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        Value* key = w.product.data() + before;
        w.each_row(n, [&](int64_t r) {
            norm_row(key + r * made, layer.key_norm, m.norms, latent, of.norm_epsilon, key + r * made);
            turn(layer, key + r * made + latent, shared, rows.positions[r]);
        });
        if (of.queries) make_queries(layer, before, n);
        const Strided made_queries = of.queries ? Strided{raised.data(), of.queries.outputs, m.head_dim}
                                                : Strided{w.product.data(), made, m.head_dim};
        const Strided query{queries.data(), heads * key_dim, key_dim};
        each_head(made_queries, of.to_latent, query, n);
        w.each_row(n, [&](int64_t r) {
            for (int64_t h = 0; h < heads; h++) {
                memcpy(query.at(r, h) + latent, made_queries.at(r, h) + own, shared * sizeof(Value));
                turn(layer, query.at(r, h) + latent, shared, rows.positions[r]);
            }
        });
        const Call call{query.first, key, key, attended.data(), query.row, query.head, made, 0, made, 0,
                        heads * latent, latent, int64_t(l), heads, layer.window, m.attention_scale, 0.0};
        w.attend(call);
        each_head({attended.data(), heads * latent, latent}, of.to_value, {w.mixed.data(), width, value_dim}, n);
        return width;
    }

  private:
    // A part of each row for each head.
    struct Strided {
        Value* first;
        int64_t row, head;  // strides, in values

        Value* at(int64_t r, int64_t h) const { return first + r * row + h * head; }
    };

    // Rotates the last `size` values of a key or query, if the layer does.
    void turn(const Layer& layer, Value* part, int64_t size, int64_t position) {
        if (!layer.cosines) return;
        if (layer.latent->in_pairs) {
            thread_local Values pairs;
            pairs.assign(part, part + size);
            for (int64_t i = 0; i < size; i++) part[i / 2 + i % 2 * (size / 2)] = pairs[i];
        }
        const int64_t first = (position - (m.entry ? 1 : 0)) * m.rotary_dim;
        rotate_head(part, layer.cosines + first, layer.sines + first, m.rotary_dim);
    }

    // Fills `raised` from the first `size` values of each row of a layer's `qkv` product.
    void make_queries(const Layer& layer, int64_t size, int64_t n) {
        low.resize(n * size), raised.resize(n * layer.latent->queries.outputs);
        w.each_row(n, [&](int64_t r) {
            norm_row(&w.product[r * layer.qkv.outputs], layer.query_norm, m.norms, size, layer.latent->norm_epsilon,
                     &low[r * size]);
        });
        w.multiply(low.data(), layer.latent->queries, raised.data(), n);
    }

    // Multiplies each head's part of the rows by the head's own weights.
    void each_head(const Strided& from, const Weights* weights, const Strided& to, int64_t n) {
        const int64_t in = weights->inputs, out = weights->outputs;
        share_out(m.num_heads, w.threads, m.parallel, [&](int64_t h) {
            thread_local Values inputs, outputs;
            inputs.resize(n * in), outputs.resize(n * out);
            for (int64_t r = 0; r < n; r++) memcpy(&inputs[r * in], from.at(r, h), in * sizeof(Value));
            m.linear(inputs.data(), weights[h].values, nullptr, outputs.data(), n, in, out, 1, nullptr);
            for (int64_t r = 0; r < n; r++) memcpy(to.at(r, h), &outputs[r * out], out * sizeof(Value));
        });
    }

    Work& w;
    const Model& m;
    Values low, raised, queries, attended;
};

}  // namespace
