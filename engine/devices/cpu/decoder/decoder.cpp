// A whole Llama-like decoder in bfloat16 or float32 (value.h), in one call. It is for models so small that calling
// operators one by one costs more than their computation. Matrix products, attention and the operators of recurrent
// layers are the engine's own kernels, called by address; the rest is here. Values are rounded to bfloat16 where
// Transformers' modules round them.

// Compilers avoid vectors of 512 bits, which slow some CPUs' clocks, but not those of CPUs with AMX.
#if defined(__AMX_BF16__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_mixer.h"
#include "delta_mixer.h"
#include "drafted.h"
#include "experts.h"
#include "latent_mixer.h"
#include "row_math.h"
#include "short_conv_mixer.h"
#include "state_space_mixer.h"
#include "structs.h"
#include "work.h"

namespace {

constexpr int64_t SERIAL_PRODUCTS = 3 << 20;  // fewest multiplications in a forward that are worth several threads

class Decoder : Work {
  public:
    explicit Decoder(const Model& model)
        : Work(model), drafted(m.entry ? m.entry->token_ids : nullptr), attention(*this), delta(*this),
          short_conv(*this), state_space(*this), latent(*this), experts(*this) {
        for (const Layer& layer : layers) widest = std::max(widest, layer.qkv.outputs);
    }

    // Sets the number of threads of later calls. Results have the same bits for every number of threads.
    Decoder& on(int64_t threads) {
        most_threads = threads;
        return *this;
    }

    // Runs a step. The caller must have called the attention's `begin`.
    void forward(const Rows& rows) {
        int64_t n = rows.count;
        const int64_t hidden = m.hidden;
        room = std::max(n, rows.num_logits);  // a row's logits may be requested twice
        x.resize(room * hidden), normed.resize(room * hidden), product.resize(room * std::max(hidden, widest));
        threads = n * m.products < SERIAL_PRODUCTS ? 1 : most_threads;
        group(rows, nullptr, n);
        if (m.entry) {
            enter(*m.entry, rows);
        } else {
            each_row(n, [&](int64_t r) {
                embed(rows.token_ids[r], &x[r * hidden]);
                if (m.embedding_multiplier) scale_row(&x[r * hidden], float(m.embedding_multiplier), hidden);
            });
        }
        int64_t captured = 0;
        bool narrows = false;  // whether only rows with logits are computed, after the last layer's mixer
        for (int64_t l = 0; l < m.num_layers; l++) {
            const Layer& layer = layers[l];
            if (captured < rows.num_hidden && rows.hidden_layers[captured] == l)
                capture(rows, captured++, x.data());
            const int64_t beside_width = layer.beside ? mix_beside(layer.beside, rows) : 0;
            const int64_t width = layer.mixer != NOTHING ? mix(l, rows) : 0;
            if (l + 1 == m.num_layers && captured == rows.num_hidden && rows.logit_rows) {
                if (!rows.num_logits) return;
                narrows = true, n = rows.num_logits;
                group(rows, rows.logit_rows, n);
                keep_rows(rows, x, hidden);
                if (width) keep_rows(rows, mixed, width);
                if (beside_width) keep_rows(rows, beside, beside_width);
            }
            if (layer.mixer != NOTHING) {
                make_output(l, mixed, width, product, n);
                if (layer.beside) add_output(layer.beside, beside_width, n);
                add_product(layer.mixed_norm, n);
            }
            if (layer.down || layer.experts) {
                norm(layer.mlp_norm, n);
                if (layer.down) feed_forward(l, n);
                if (layer.experts) experts.run(l, n);
                add_product(layer.made_norm, n);
            }
        }
        if (captured < rows.num_hidden) {  // the last hidden state is taken after the final norm
            norm(m.final_norm, n);
            capture(rows, captured, normed.data());
        }
        for (int64_t i = 0; i < rows.num_logits; i++) {
            const int64_t r = rows.logit_rows && !narrows ? rows.logit_rows[i] : i;
            norm_or_copy(&x[r * hidden], m.final_norm, &normed[i * hidden]);
            if (rows.after)
                memcpy(rows.after + i * hidden, m.entry->feeds_normed ? &normed[i * hidden] : &x[r * hidden],
                       hidden * sizeof(Value));
        }
        make_whole(m.head, rows.logits, rows.num_logits, m.vocab, [&](Value* out) {
            multiply(normed.data(), m.head, out, rows.num_logits);
            scale(m.head, out, rows.num_logits);
        });
        if (m.logits_scaling)
            each_row(rows.num_logits, [&](int64_t r) {
                divide_row(rows.logits + r * m.vocab, float(m.logits_scaling), m.vocab);
            });
    }

    // Runs rows without trees. Returns the name of the field that is out of range, or null.
    const char* run(const Batch& b, Rows rows) {
        if (const char* fault = place_rows(b)) return fault;
        if (const char* fault = begin(b, b.num_sequences)) return fault;
        rows.token_ids = b.token_ids, rows.positions = positions.data();
        forward(rows);
        return nullptr;
    }

    // Drafts tokens. Returns the name of the field that is out of range, or null.
    const char* draft(const Draft& d) {
        const Batch& b = d.batch;
        const int64_t n = b.num_sequences;
        for (int64_t s = 0; s < n; s++) {
            if (d.counts[s] < 1 || d.counts[s] > d.counts[s ? s - 1 : 0]) return "counts";
            if (b.ends[s] + d.counts[s] - 1 > b.table_stride * b.block_size) return "block_table";
        }
        if (const char* fault = place_rows(b)) return fault;
        last_tokens.resize(n), scores.resize(n * m.vocab), after.resize(m.entry ? n * m.hidden : 0);
        Value* hidden = m.entry ? after.data() : nullptr;
        Rows rows{b.token_ids, positions.data(), int64_t(positions.size()), last_rows.data(), n, scores.data(),
                  nullptr, 0, nullptr, mixed_states(d.before, int64_t(positions.size())), hidden};
        int64_t drafting = n;
        for (int64_t token = 0;; token++) {
            if (const char* fault = begin(b, drafting)) return fault;
            forward(rows);
            for (int64_t s = 0; s < drafting; s++) {
                last_tokens[s] = drafted.next(d, s, token, &scores[s * m.vocab]);
                d.drafted[token * n + s] = last_tokens[s];
            }
            while (drafting && d.counts[drafting - 1] <= token + 1) drafting--;
            if (!drafting) return nullptr;
            positions.resize(drafting), slots.resize(drafting * m.num_tables);
            for (int64_t s = 0; s < drafting; s++) {
                place_row(b, s, s, b.ends[s] + token);
                query_start[s + 1] = int32_t(s + 1);
            }
            rows = {last_tokens.data(), positions.data(), drafting, nullptr, drafting, scores.data(),
                    nullptr, 0, nullptr, hidden, hidden};
        }
    }

  private:
    // Computes each row's position and slot, and each sequence's last row.
    const char* place_rows(const Batch& b) {
        if (const char* fault = b.fault()) return fault;
        const int64_t n = b.num_sequences;
        int64_t total = 0;
        for (int64_t s = 0; s < n; s++) total += b.ends[s] - b.starts[s];
        positions.resize(total), slots.resize(total * m.num_tables);
        query_start.assign(1, 0), context_len.resize(n), last_rows.clear();
        int64_t row = 0;
        for (int64_t s = 0; s < n; s++) {
            for (int64_t place = b.starts[s]; place < b.ends[s]; place++) place_row(b, s, row++, place);
            query_start.push_back(int32_t(row));
            last_rows.push_back(row - 1);
        }
        return nullptr;
    }

    void place_row(const Batch& b, int64_t s, int64_t row, int64_t place) {
        positions[row] = place;
        for (int64_t table = 0; table < m.num_tables; table++)
            slots[table * positions.size() + row] = b.slot(table, s, place);
        context_len[s] = int32_t(place + 1);
    }

    // Begins the attention's step over these rows.
    const char* begin(const Batch& b, int64_t num_sequences) {
        const int64_t rows = positions.size();
        for (int64_t table = 0; table < m.num_tables; table++) {
            const Step step{query_start.data(), context_len.data(), b.table(table), &slots[table * rows], nullptr,
                            nullptr, b.first_key, b.table_stride, num_sequences, rows, most_threads, m.parallel};
            if (const char* fault = m.begin(m.attention[table], &step)) return fault;
        }
        return nullptr;
    }

    // Returns the hidden states that a draft head reads, made from n rows of the target's hidden states.
    const Value* mixed_states(const Value* states, int64_t n) {
        if (!m.entry || !m.entry->mixing) return states;
        targets.resize(n * m.hidden);
        threads = n * m.entry->mixing.inputs * m.hidden < SERIAL_PRODUCTS ? 1 : most_threads;
        multiply(states, m.entry->mixing, targets.data(), n);
        return targets.data();
    }

    void embed(int64_t token, Value* out) const {
        if (m.embeddings) memcpy(out, m.embeddings + token * m.hidden, m.hidden * sizeof(Value));
        else m.quantized_rows(m.coded_embeddings, &token, 1, out);
    }

    // Fills `x` and `normed` for the head's layer, with room in `normed` for the rows with logits.
    void enter(const HeadInput& entry, const Rows& rows) {
        const int64_t n = rows.count, hidden = m.hidden;
        normed.resize(std::max(2 * n, rows.num_logits) * hidden);
        each_row(n, [&](int64_t r) {
            const Value* before = rows.before + r * hidden;
            Value *token_half = &normed[r * 2 * hidden], *hidden_half = token_half + hidden;
            embed(rows.token_ids[r], token_half);
            if (entry.token_norm) norm_row(token_half, entry.token_norm, m.norms, m.hidden, m.norm_epsilon, token_half);
            norm_or_copy(before, entry.hidden_norm, hidden_half);
            if (!entry.joint) memcpy(&x[r * hidden], entry.normed_goes_on ? hidden_half : before, hidden * sizeof(Value));
        });
        if (!entry.joint) return;
        multiply(normed.data(), entry.joint, x.data(), n);
        memcpy(normed.data(), x.data(), n * hidden * sizeof(Value));
    }

    void norm_or_copy(const Value* row, const Value* weight, Value* out) const {
        if (weight) norm_row(row, weight, m.norms, m.hidden, m.norm_epsilon, out);
        else memcpy(out, row, m.hidden * sizeof(Value));
    }

    void norm(const Value* weight, int64_t n) {
        each_row(n, [&](int64_t r) {
            norm_row(&x[r * m.hidden], weight, m.norms, m.hidden, m.norm_epsilon, &normed[r * m.hidden]);
        });
    }

    // Adds `product` to the residual, normed if there is a weight.
    void add_product(const Value* weight, int64_t n) {
        each_row(n, [&](int64_t r) {
            Value* row = &product[r * m.hidden];
            if (weight) norm_row(row, weight, m.norms, m.hidden, m.norm_epsilon, row);
            if (m.residual_multiplier) scale_row(row, float(m.residual_multiplier), m.hidden);
            add_row(&x[r * m.hidden], row, m.hidden);
        });
    }

    // Keeps only the rows with logits.
    void keep_rows(const Rows& rows, Values& values, int64_t width) {
        kept.resize(rows.num_logits * width);
        for (int64_t i = 0; i < rows.num_logits; i++)
            memcpy(&kept[i * width], &values[rows.logit_rows[i] * width], width * sizeof(Value));
        values.swap(kept);
    }

    void capture(const Rows& rows, int64_t index, const Value* from) {
        for (int64_t r = 0; r < rows.count; r++)
            memcpy(rows.hidden + (r * rows.num_hidden + index) * m.hidden, from + r * m.hidden,
                   m.hidden * sizeof(Value));
    }

    // Fills `mixed` from rows, and returns its width.
    int64_t mix(size_t l, const Rows& rows) {
        const Layer& layer = layers[l];
        if (layer.input_norm) norm(layer.input_norm, rows.count);
        if (layer.input_multiplier)
            each_row(rows.count, [&](int64_t r) {
                scale_row(&normed[r * m.hidden], float(layer.input_multiplier), m.hidden);
            });
        switch (layer.mixer) {
            case DELTA:
            case CHANNEL_DELTA: return delta.mix(l, rows);
            case SHORT_CONV: return short_conv.mix(l, rows);
            case STATE_SPACE: return state_space.mix(l, rows);
            case LATENT: return latent.mix(l, rows);
            default: return attention.mix(l, rows);
        }
    }

    // Like `mix`, but fills `beside`.
    int64_t mix_beside(size_t l, const Rows& rows) {
        mixed.swap(beside);
        const int64_t width = mix(l, rows);
        mixed.swap(beside);
        return width;
    }

    // Fills `out` with a layer's output product of its mixer's result `made`.
    void make_output(size_t l, Values& made, int64_t width, Values& out, int64_t n) {
        const Layer& layer = layers[l];
        gather(made, n, layer.qkv.first, width, layer.output.inputs);
        make_whole(layer.output, out.data(), n, m.hidden, [&](Value* to) {
            project(l, OUTPUT, made.data(), layer.output, to, n);
        });
    }

    // Adds the output product of `beside` to `product`.
    void add_output(size_t l, int64_t width, int64_t n) {
        summand.resize(n * m.hidden);
        make_output(l, beside, width, summand, n);
        each_row(n, [&](int64_t r) { add_row(&product[r * m.hidden], &summand[r * m.hidden], m.hidden); });
    }

    void feed_forward(size_t l, int64_t n) {
        const Layer& layer = layers[l];
        const int64_t made = layer.gate_up.outputs, width = m.activation == RELU2 ? made : made / 2;
        gated.resize(n * made), active.resize(n * width);
        project(l, GATE_UP, normed.data(), layer.gate_up, gated.data(), n);
        each_row(n, [&](int64_t r) { activate(&gated[r * made], width, &active[r * width]); });
        gather(active, n, layer.gate_up.first, width, layer.down.inputs);
        make_whole(layer.down, product.data(), n, m.hidden, [&](Value* out) {
            project(l, DOWN, active.data(), layer.down, out, n);
        });
    }

    Drafted drafted;
    AttentionMixer attention;
    DeltaMixer delta;
    ShortConvMixer short_conv;
    StateSpaceMixer state_space;
    LatentMixer latent;
    ExpertMlp experts;
    Values x, gated, active, targets, kept;
    Values beside, summand;  // the second mixer's result, and its output product
    Values scores, after;  // for each sequence's last row, while drafting
    // Arrays of the attention's step.
    std::vector<int64_t> last_tokens, positions, slots, last_rows;
    std::vector<int32_t> query_start, context_len;
    int64_t most_threads = 1;
    int64_t widest = 0;  // outputs of a mixer's input product
};

}  // namespace

extern "C" {

void* tandem_decoder_create(const Model* model) { return new Decoder(*model); }

void tandem_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

void tandem_decoder_forward(void* decoder, const Rows* rows, int64_t threads) {
    static_cast<Decoder*>(decoder)->on(threads).forward(*rows);
}

const char* tandem_decoder_run(void* decoder, const Batch* batch, const Rows* rows, int64_t threads) {
    return static_cast<Decoder*>(decoder)->on(threads).run(*batch, *rows);
}

const char* tandem_decoder_draft(void* decoder, const Draft* draft, int64_t threads) {
    return static_cast<Decoder*>(decoder)->on(threads).draft(*draft);
}
}
