// A whole Llama-like decoder in bfloat16, in one call. It is for models so small that calling operators one by one
// costs more than their computation. Matrix products and attention are the engine's own kernels, called by address;
// the rest is here. Values are rounded to bfloat16 where Transformers' modules round them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../sampler/choice.h"
#include "row_math.h"
#include "structs.h"

namespace {

constexpr int64_t SERIAL_PRODUCTS = 1 << 22;  // below so many multiplications in a forward, threads don't pay
constexpr int64_t SERIAL_ROWS = 16;           // below so many rows, threads don't pay between two products
constexpr int64_t ROWS_AT_ONCE = 8;

class Decoder {
  public:
    explicit Decoder(const Model& model) : m(model), layers(model.layers, model.layers + model.num_layers) {}

    // Calls from now on use up to so many threads. Results have the same bits on any number of them.
    Decoder& on(int64_t threads) {
        most_threads = threads;
        return *this;
    }

    // The caller has called the attention's `begin`.
    void forward(const Rows& rows) {
        int64_t n = rows.count;
        const int64_t hidden = m.hidden, queries = m.num_heads * m.head_dim;
        const int64_t room = std::max(n, rows.num_logits);  // a row's logits may be wanted twice
        x.resize(room * hidden), normed.resize(room * hidden);
        attended.resize(room * queries);
        threads = n * m.products < SERIAL_PRODUCTS ? 1 : most_threads;
        group(rows, nullptr, n);
        if (m.entry) {
            enter(*m.entry, rows);
        } else {
            each_row(n, [&](int64_t r) { memcpy(&x[r * hidden], embedding(rows, r), hidden * sizeof(bf16)); });
        }
        int64_t captured = 0;
        bool narrows = false;  // after the last layer's attention only rows with logits are computed
        for (size_t l = 0; l < layers.size(); l++) {
            const Layer& layer = layers[l];
            if (captured < rows.num_hidden && rows.hidden_layers[captured] == int64_t(l))
                capture(rows, captured++, x.data());
            const int64_t qkv = layer.qkv.out, keys = (qkv - queries) / 2;
            product.resize(room * std::max(hidden, qkv));
            if (layer.input_norm) norm(layer.input_norm, n);
            project(l, QKV, normed.data(), layer.qkv, product.data(), n);
            each_row(n, [&](int64_t r) { place_heads(layer, queries + keys, &product[r * qkv], rows.positions[r] - (m.entry ? 1 : 0)); });
            const bf16* q = product.data();
            const Call call{q, q + queries, q + queries + keys, attended.data(), qkv, m.head_dim, qkv, m.head_dim,
                            qkv, m.head_dim, queries, m.head_dim, int64_t(l), m.num_heads, layer.window,
                            m.attention_scale, 0.0};
            m.attend(m.attention, &call);
            if (l + 1 == layers.size() && captured == rows.num_hidden && rows.logit_rows) {
                if (!rows.num_logits) return;
                narrows = true, n = rows.num_logits;
                group(rows, rows.logit_rows, n);
                keep_rows(rows, x, hidden), keep_rows(rows, attended, queries);
            }
            gather(attended, n, layer.qkv.first, queries, layer.output.in);
            make_whole(layer.output, product.data(), n, hidden, [&](bf16* out) {
                project(l, OUTPUT, attended.data(), layer.output, out, n);
            });
            add_product(n);
            norm(layer.mlp_norm, n);
            feed_forward(l, n);
            add_product(n);
        }
        if (captured < rows.num_hidden) {  // the last hidden state is taken after the final norm
            norm(m.final_norm, n);
            capture(rows, captured, normed.data());
        }
        for (int64_t i = 0; i < rows.num_logits; i++) {
            const int64_t r = rows.logit_rows && !narrows ? rows.logit_rows[i] : i;
            if (m.final_norm) norm_row(&x[r * hidden], m.final_norm, hidden, m.norm_epsilon, &normed[i * hidden]);
            else memcpy(&normed[i * hidden], &x[r * hidden], hidden * sizeof(bf16));
            if (rows.after)
                memcpy(rows.after + i * hidden, m.entry->feeds_normed ? &normed[i * hidden] : &x[r * hidden],
                       hidden * sizeof(bf16));
        }
        make_whole(m.head, rows.logits, rows.num_logits, m.vocab, [&](bf16* out) {
            multiply(normed.data(), m.head, out, rows.num_logits);
        });
    }

    // The name of the field that is out of range, or null.
    const char* run(const Batch& b, Rows rows) {
        if (const char* fault = place_rows(b)) return fault;
        if (const char* fault = begin(b, b.num_sequences)) return fault;
        rows.token_ids = b.token_ids, rows.positions = positions.data();
        forward(rows);
        return nullptr;
    }

    // The name of the field that is out of range, or null.
    const char* draft(const Draft& d) {
        const Batch& b = d.batch;
        const int64_t n = b.num_sequences;
        for (int64_t s = 0; s < n; s++) {
            if (d.counts[s] < 1 || d.counts[s] > d.counts[s ? s - 1 : 0]) return "counts";
            if (b.ends[s] + d.counts[s] - 1 > b.table_stride * b.block_size) return "block_table";
        }
        if (const char* fault = place_rows(b)) return fault;
        last_tokens.resize(n), scores.resize(n * m.vocab), after.resize(m.entry ? n * m.hidden : 0);
        bf16* hidden = m.entry ? after.data() : nullptr;
        Rows rows{b.token_ids, positions.data(), int64_t(positions.size()), last_rows.data(), n, scores.data(),
                  nullptr, 0, nullptr, mixed_states(d.before, int64_t(positions.size())), hidden};
        int64_t drafting = n;
        for (int64_t token = 0;; token++) {
            if (const char* fault = begin(b, drafting)) return fault;
            forward(rows);
            for (int64_t s = 0; s < drafting; s++) {
                last_tokens[s] = next_token(d, s, token, &scores[s * m.vocab]);
                d.drafted[token * n + s] = last_tokens[s];
            }
            while (drafting && d.counts[drafting - 1] <= token + 1) drafting--;
            if (!drafting) return nullptr;
            positions.resize(drafting), slots.resize(drafting);
            for (int64_t s = 0; s < drafting; s++) {
                place_row(b, s, s, b.ends[s] + token);
                query_start[s + 1] = int32_t(s + 1);
            }
            rows = {last_tokens.data(), positions.data(), drafting, nullptr, drafting, scores.data(),
                    nullptr, 0, nullptr, hidden, hidden};
        }
    }

  private:
    // Finds each row's position and slot, and the last row of each sequence.
    const char* place_rows(const Batch& b) {
        if (const char* fault = b.fault()) return fault;
        const int64_t n = b.num_sequences;
        int64_t total = 0;
        for (int64_t s = 0; s < n; s++) total += b.ends[s] - b.starts[s];
        positions.resize(total), slots.resize(total);
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
        slots[row] = b.slot(s, place);
        context_len[s] = int32_t(place + 1);
    }

    // Begins the attention's step over these rows.
    const char* begin(const Batch& b, int64_t num_sequences) {
        const Step step{query_start.data(), context_len.data(), b.block_table, slots.data(), nullptr, nullptr,
                        b.first_key, b.table_stride, num_sequences, int64_t(slots.size()), most_threads, m.parallel};
        return m.begin(m.attention, &step);
    }

    // The hidden states that a draft head reads, made from n rows of the target's.
    const bf16* mixed_states(const bf16* states, int64_t n) {
        if (!m.entry || !m.entry->mixing) return states;
        mixed.resize(n * m.hidden);
        threads = n * m.entry->mixing.in * m.hidden < SERIAL_PRODUCTS ? 1 : most_threads;
        multiply(states, m.entry->mixing, mixed.data(), n);
        return mixed.data();
    }

    template <class Work> void each_row(int64_t n, const Work& work) {
        share_out((n + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, n < SERIAL_ROWS ? 1 : threads, m.parallel, [&](int64_t part) {
            const int64_t first = part * ROWS_AT_ONCE;
            for (int64_t r = first; r < std::min(first + ROWS_AT_ONCE, n); r++) work(r);
        });
    }

    const bf16* embedding(const Rows& rows, int64_t r) const {
        return m.embeddings + rows.token_ids[r] * m.hidden;
    }

    // Fills `x` and `normed` as the head's layer reads them, with room in `normed` for the rows with logits.
    void enter(const Entry& entry, const Rows& rows) {
        const int64_t n = rows.count, hidden = m.hidden;
        normed.resize(std::max(2 * n, rows.num_logits) * hidden);
        each_row(n, [&](int64_t r) {
            const bf16* before = rows.before + r * hidden;
            bf16 *token_half = &normed[r * 2 * hidden], *hidden_half = token_half + hidden;
            if (!entry.token_norm) {
                memcpy(token_half, embedding(rows, r), hidden * sizeof(bf16));
                memcpy(hidden_half, before, hidden * sizeof(bf16));
                return;
            }
            norm_row(embedding(rows, r), entry.token_norm, hidden, m.norm_epsilon, token_half);
            norm_row(before, entry.hidden_norm, hidden, m.norm_epsilon, hidden_half);
            memcpy(&x[r * hidden], entry.normed_goes_on ? hidden_half : before, hidden * sizeof(bf16));
        });
        if (entry.token_norm) return;
        multiply(normed.data(), entry.joint, x.data(), n);
        memcpy(normed.data(), x.data(), n * hidden * sizeof(bf16));
    }

    int64_t token_id(int64_t chosen) const {
        return m.entry && m.entry->token_ids ? m.entry->token_ids[chosen] : chosen;
    }

    void norm(const bf16* weight, int64_t n) {
        each_row(n, [&](int64_t r) {
            norm_row(&x[r * m.hidden], weight, m.hidden, m.norm_epsilon, &normed[r * m.hidden]);
        });
    }

    void add_product(int64_t n) {
        each_row(n, [&](int64_t r) { add_row(&x[r * m.hidden], &product[r * m.hidden], m.hidden); });
    }

    // Keeps only the rows with logits.
    void keep_rows(const Rows& rows, std::vector<bf16>& values, int64_t width) {
        kept.resize(rows.num_logits * width);
        for (int64_t i = 0; i < rows.num_logits; i++)
            memcpy(&kept[i * width], &values[rows.logit_rows[i] * width], width * sizeof(bf16));
        values.swap(kept);
    }

    void capture(const Rows& rows, int64_t index, const bf16* from) {
        for (int64_t r = 0; r < rows.count; r++)
            memcpy(rows.hidden + (r * rows.num_hidden + index) * m.hidden, from + r * m.hidden,
                   m.hidden * sizeof(bf16));
    }

    void multiply(const bf16* in, const Weights& w, bf16* out, int64_t n) {
        if (w.quantized) return m.quantized_linear(in, w.quantized, out, n, threads, m.parallel);
        m.linear(in, w.values, w.bias, out, n, w.in, w.out, threads, m.parallel);
    }

    // Finds the rows of each adapter, among the `kept` ones (null: all).
    void group(const Rows& rows, const int64_t* kept, int64_t n) {
        groups.resize(rows.num_adapters), adapted.resize(rows.num_adapters);
        for (auto& group : groups) group.clear();
        for (int64_t i = 0; rows.num_adapters && i < n; i++)
            if (const int32_t owner = rows.owners[kept ? kept[i] : i]; owner >= 0) groups[owner].push_back(i);
        adapters = rows.adapters;
    }

    // One of a layer's products, with what rows' adapters have beside it.
    void project(size_t l, Product which, const bf16* in, const Weights& w, bf16* out, int64_t n) {
        multiply(in, w, out, n);
        if (groups.empty()) return;
        const int64_t first = l * PARTS + which, next = which == QKV ? OUTPUT : which == GATE_UP ? DOWN : which + 1;
        for (size_t i = 0; i < groups.size(); i++)
            adapted[i] = {adapters[i] + first, next - which, groups[i].data(), int64_t(groups[i].size())};
        m.adapt(in, w.in, out, w.out, adapted.data(), adapted.size(), threads, m.parallel);
    }

    // Has `compute` write all `width` outputs of each row; or those that a rank's weights have, which it gathers.
    template <class Compute>
    void make_whole(const Weights& w, bf16* out, int64_t n, int64_t width, const Compute& compute) {
        if (w.out == width) return compute(out);
        part.resize(n * w.out);
        compute(part.data());
        gather(part.data(), out, n, w.first, w.out, width);
    }

    // Makes rows whole of which a rank has `own` values.
    void gather(std::vector<bf16>& values, int64_t n, int64_t first, int64_t own, int64_t width) {
        if (own == width) return;
        part.swap(values);
        values.resize(n * width);
        gather(part.data(), values.data(), n, first, own, width);
    }

    void gather(const bf16* from, bf16* whole, int64_t n, int64_t first, int64_t own, int64_t width) {
        m.gather(m.ranks, from, whole, n, first * sizeof(bf16), own * sizeof(bf16), width * sizeof(bf16));
    }

    // Normalizes (where the model does) and rotates a row's queries and keys.
    void place_heads(const Layer& layer, int64_t width, bf16* row, int64_t position) {
        const bf16 *cosine = m.cosines + position * m.head_dim, *sine = m.sines + position * m.head_dim;
        for (int64_t h = 0; h * m.head_dim < width; h++, row += m.head_dim) {
            const bf16* weight = h < m.num_heads ? layer.query_norm : layer.key_norm;
            if (weight) norm_row(row, weight, m.head_dim, m.norm_epsilon, row);
            rotate_head(row, cosine, sine, m.head_dim);
        }
    }

    void feed_forward(size_t l, int64_t n) {
        const Layer& layer = layers[l];
        const int64_t width = layer.gate_up.out / 2;
        gated.resize(n * 2 * width), active.resize(n * width);
        project(l, GATE_UP, normed.data(), layer.gate_up, gated.data(), n);
        each_row(n, [&](int64_t r) {
            const bf16* gate = &gated[r * 2 * width];
            gate_row(gate, gate + width, width, &active[r * width]);
        });
        gather(active, n, layer.gate_up.first, width, layer.down.in);
        make_whole(layer.down, product.data(), n, m.hidden, [&](bf16* out) {
            project(l, DOWN, active.data(), layer.down, out, n);
        });
    }

    // The sequence's drafted token of this number, from its logits.
    int64_t next_token(const Draft& d, int64_t s, int64_t number, const bf16* logits) {
        const int64_t start = d.batch.ends[s], position = start + number;
        if (!d.distributions)
            return token_id(choose(logits, d.vocab, d.seeds[s], position, d.temperatures[s]));
        float* distribution = d.distributions + (s * d.counts[0] + number) * d.width;
        spread(logits, d.vocab, d.temperatures[s], distribution, d.width);
        return draw(distribution, d.width, round_key(d.seeds[s], start, position, DRAFT));
    }

    // The softmax of logits / temperature, over the target's vocabulary. If greedy, or without a finite logit, one
    // token has probability 1.
    void spread(const bf16* logits, int64_t vocab, float temperature, float* distribution, int64_t width) {
        std::fill_n(distribution, width, 0.0f);
        const int64_t likeliest = argmax(logits, vocab);
        if (likeliest < 0 || temperature == 0) {
            distribution[token_id(std::max<int64_t>(likeliest, 0))] = 1;
            return;
        }
        values.resize(vocab);
        scale_row(logits, vocab, likeliest, temperature, values.data());
        const bool is_whole = !m.entry || !m.entry->token_ids;
        probabilities.resize(is_whole ? 0 : vocab);
        softmax(values.data(), vocab, -NOISE_SPAN, is_whole ? distribution : probabilities.data());
        for (int64_t i = 0; i < int64_t(probabilities.size()); i++) distribution[token_id(i)] = probabilities[i];
    }

    // The argmax of logits / temperature + Gumbel noise, as the sampler computes it without filters.
    int64_t choose(const bf16* logits, int64_t vocab, int64_t seed, int64_t position, float temperature) {
        const int64_t likeliest = argmax(logits, vocab);
        if (likeliest < 0) return 0;
        if (temperature == 0) return likeliest;
        values.resize(vocab);
        scale_row(logits, vocab, likeliest, temperature, values.data());
        const uint64_t key = stream_key(seed, position);
        constexpr float NO_FLOOR = -std::numeric_limits<float>::infinity();
        if (const int64_t* ids = m.entry ? m.entry->token_ids : nullptr)
            return race(values.data(), vocab, NO_FLOOR, likeliest, key, [=](int64_t i) { return ids[i]; });
        return race(values.data(), vocab, NO_FLOOR, likeliest, key, [](int64_t i) { return i; });
    }

    const Model m;
    const std::vector<Layer> layers;
    std::vector<bf16> x, normed, product, attended, gated, active, mixed, kept, part;
    std::vector<float> values, probabilities;
    std::vector<bf16> scores, after;  // of each sequence's last row, while drafting
    // The attention's step.
    std::vector<int64_t> last_tokens, positions, slots, last_rows;
    std::vector<int32_t> query_start, context_len;
    int64_t most_threads = 1, threads = 1;
    std::vector<std::vector<int64_t>> groups;  // the rows of each adapter
    std::vector<Adapted> adapted;
    const Part* const* adapters = nullptr;
};

}  // namespace

extern "C" {

extern const int64_t tandem_sizes[] = {sizeof(Weights), sizeof(Layer), sizeof(Entry), sizeof(Model),
                                       sizeof(Rows),    sizeof(Batch), sizeof(Draft)};

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
