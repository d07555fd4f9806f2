// Attention over the rows of a step. Heads may be normed, partly rotated, and gated.

#pragma once

#include <cstdint>

#include "gate_math.h"
#include "work.h"

namespace {

class AttentionMixer {
  public:
    explicit AttentionMixer(Work& work) : w(work), m(work.m) {}

    // Fills `mixed` from a layer's `normed` rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = w.layers[l];
        const int64_t n = rows.count, dim = m.head_dim, width = m.num_heads * dim;
        const int64_t qkv = layer.qkv.outputs, apart = m.opens_heads ? 2 * dim : dim;  // `apart`: stride of queries
        const int64_t keys = (qkv - m.num_heads * apart) / 2;
        w.mixed.resize(w.room * width);
        w.project(l, QKV, w.normed.data(), layer.qkv, w.product.data(), n);
        const Value *q = w.product.data(), *k = q + m.num_heads * apart;
        w.each_row(n, [&](int64_t r) {
            const int64_t position = rows.positions[r] - (m.entry ? 1 : 0);
            Value *query = &w.product[r * qkv], *key = query + m.num_heads * apart;
            for (int64_t h = 0; h < m.num_heads; h++) place_head(layer, query + h * apart, layer.query_norm, position);
            for (int64_t first = 0; first < keys; first += dim) place_head(layer, key + first, layer.key_norm, position);
        });
        const Call call{q, k, k + keys, w.mixed.data(), qkv, apart, qkv, dim, qkv, dim, width, dim,
                        int64_t(l), m.num_heads, layer.window, m.attention_scale, 0.0, layer.sinks};
        w.attend(call);
        if (!m.opens_heads) return width;
        w.each_row(n, [&](int64_t r) {
            for (int64_t h = 0; h < m.num_heads; h++)
                open_row(q + r * qkv + h * apart + dim, dim, &w.mixed[r * width + h * dim]);
        });
        return width;
    }

  private:
    // Normalizes (if the model does) and rotates one head of a row.
    void place_head(const Layer& layer, Value* head, const Value* weight, int64_t position) {
        if (weight) norm_row(head, weight, m.norms, m.head_dim, m.norm_epsilon, head);
        const int64_t first = position * m.rotary_dim;
        rotate_head(head, layer.cosines + first, layer.sines + first, m.rotary_dim);
    }

    Work& w;
    const Model& m;
};

}  // namespace
