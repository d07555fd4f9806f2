// Chooses drafted tokens by their logits, and ends chains that are unlikely to be accepted.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "../../../sampler/choice.h"
#include "structs.h"

namespace {

constexpr float NEAR = 4;       // scores that are less by more hardly count against the best one
constexpr float SHARPNESS = 2;  // of the softmax that confidences come from: as speculation/drawing.py has it

class Drafted {
  public:
    // `ids`: the token of each logit; null: the logit's index.
    explicit Drafted(const int64_t* ids) : ids(ids) {}

    // The sequence's drafted token of this number, from its logits.
    int64_t next(const Draft& d, int64_t s, int64_t number, const Value* logits) {
        const int64_t start = d.batch.ends[s], position = start + number;
        if (!d.distributions) return token_id(choose(logits, d, s, position));
        float* distribution = d.distributions + (s * d.counts[0] + number) * d.width;
        spread(logits, d.vocab, d.temperatures[s], distribution, d.width);
        return draw(distribution, d.width, round_key(d.seeds[s], start, position, DRAFT));
    }

    // The log-odds of the newest token against the others, as far as logits and noise tell.
    float confidence() const { return -std::log(std::max(others, 1e-6f)); }

  private:
    int64_t token_id(int64_t chosen) const { return ids ? ids[chosen] : chosen; }

    // The softmax of logits / temperature, over the target's vocabulary. If greedy, or without a finite logit, one
    // token has probability 1.
    void spread(const Value* logits, int64_t vocab, float temperature, float* distribution, int64_t width) {
        std::fill_n(distribution, width, 0.0f);
        const int64_t likeliest = argmax(logits, vocab);
        if (likeliest < 0 || temperature == 0) {
            distribution[token_id(std::max<int64_t>(likeliest, 0))] = 1;
            return;
        }
        values.resize(vocab);
        scale_row(logits, vocab, likeliest, temperature, values.data());
        const bool is_whole = !ids;
        probabilities.resize(is_whole ? 0 : vocab);
        softmax(values.data(), vocab, -NOISE_SPAN, is_whole ? distribution : probabilities.data());
        for (int64_t i = 0; i < int64_t(probabilities.size()); i++) distribution[token_id(i)] = probabilities[i];
    }

    // The argmax of logits / temperature + Gumbel noise, as the sampler computes it without filters.
    int64_t choose(const Value* logits, const Draft& d, int64_t s, int64_t position) {
        const int64_t vocab = d.vocab;
        const float temperature = d.temperatures[s];
        const int64_t likeliest = argmax(logits, vocab);
        others = 1;
        if (likeliest < 0) return 0;
        if (temperature == 0 && !d.confidences) return likeliest;
        values.resize(vocab);
        if (temperature == 0) {
            scale_row(logits, vocab, likeliest, 1 / SHARPNESS, values.data());
            values[likeliest] = -NOISE_SPAN * SHARPNESS;
            others = sum_of_exp(values.data(), vocab);
            return likeliest;
        }
        scale_row(logits, vocab, likeliest, temperature, values.data());
        const uint64_t key = stream_key(d.seeds[s], position);
        const float near = d.confidences ? NEAR : 1e-4f;
        const auto choose_by = [&](const auto& token_id) {
            int64_t best = likeliest;
            const float first_score = values[likeliest] + gumbel_noise(key, token_id(likeliest));
            float best_score = first_score;
            scores.assign(1, first_score);
            constexpr float NO_FLOOR = -std::numeric_limits<float>::infinity();
            each_above(values.data(), vocab, NO_FLOOR, first_score - near, key, token_id, [&](int64_t i, float score) {
                if (i == likeliest) return;
                scores.push_back(score);
                if (score > best_score || (score == best_score && i < best)) best = i, best_score = score;
            });
            for (float& score : scores) score = (score - best_score) * temperature * SHARPNESS;
            others = sum_of_exp(scores.data(), scores.size()) - 1;
            return best;
        };
        return ids ? choose_by([this](int64_t i) { return ids[i]; }) : choose_by([](int64_t i) { return i; });
    }

    static float sum_of_exp(const float* __restrict values, int64_t size) {
        float sums[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += exp_of(values[i + lane]);
        float total = 0;
        for (; i < size; i++) total += exp_of(values[i]);
        for (const float sum : sums) total += sum;
        return total;
    }

    const int64_t* const ids;
    std::vector<float> values, probabilities, scores;
    float others = 1;  // the sum of the other tokens' weights, that of the newest token being 1
};

// The sequences of a draft whose chains grow on.
class Chains {
  public:
    std::vector<int64_t> growing;

    void begin(int64_t n) {
        growing.resize(n), survival.assign(n, 1);
        std::iota(growing.begin(), growing.end(), 0);
    }

    // Adds a token to the i-th growing chain. Returns whether the chain grows on.
    bool add(const Draft& d, int64_t i, int64_t number, int64_t token, float confidence) {
        const int64_t n = d.batch.num_sequences, s = growing[i];
        d.drafted[number * n + s] = token;
        d.lengths[s] = number + 1;
        if (d.confidences) {
            d.confidences[number * n + s] = confidence;
            survival[s] /= 1 + std::exp(-(d.offset + d.slope * confidence));
        }
        return number + 1 < d.counts[s] && survival[s] >= d.floor;
    }

    // Keeps the growing chains at these ascending indices, and makes `rest` the batch of their sequences.
    void keep(const Batch& whole, const std::vector<int64_t>& indices, int64_t num_tables, Batch& rest) {
        keep_items(growing.data(), indices, 1);
        growing.resize(indices.size());
        tables.clear(), first_keys.clear();
        for (int64_t table = 0; table < num_tables; table++)
            for (const int64_t s : growing) {
                const int32_t* row = whole.table(table) + s * whole.table_stride;
                tables.insert(tables.end(), row, row + whole.table_stride);
            }
        for (const int64_t s : growing) first_keys.push_back(whole.first_key ? whole.first_key[s] : 0);
        rest.num_sequences = growing.size();
        rest.block_table = tables.data(), rest.first_key = first_keys.data();
    }

    // Moves the items at these ascending indices, of `width` values each, to the front.
    template <class T> static void keep_items(T* items, const std::vector<int64_t>& indices, int64_t width) {
        for (int64_t i = 0; i < int64_t(indices.size()); i++)
            memmove(items + i * width, items + indices[i] * width, width * sizeof(T));
    }

  private:
    std::vector<float> survival;  // the chance that a chain is accepted whole
    std::vector<int32_t> tables, first_keys;
};

}  // namespace
