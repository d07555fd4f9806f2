// The choice of draft tokens by their logits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../../sampler/choice.h"
#include "structs.h"

namespace {

class Drafted {
  public:
    // `ids`: the token of each logit; null if it is the logit's index.
    explicit Drafted(const int64_t* ids) : ids(ids) {}

    // Returns the sequence's `number`-th draft token, from its logits.
    int64_t next(const Draft& d, int64_t s, int64_t number, const Value* logits) {
        const int64_t start = d.batch.ends[s], position = start + number;
        if (!d.distributions)
            return token_id(choose(logits, d.vocab, d.seeds[s], position, d.temperatures[s]));
        float* distribution = d.distributions + (s * d.counts[0] + number) * d.width;
        spread(logits, d.vocab, d.temperatures[s], distribution, d.width);
        return draw(distribution, d.width, round_key(d.seeds[s], start, position, DRAFT));
    }

  private:
    int64_t token_id(int64_t chosen) const { return ids ? ids[chosen] : chosen; }

    // Writes the softmax of logits / temperature, over the target's vocabulary. If greedy, or without a finite logit,
    // one token has probability 1.
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

    // Returns the argmax of logits / temperature + Gumbel noise, like the sampler without filters.
    int64_t choose(const Value* logits, int64_t vocab, int64_t seed, int64_t position, float temperature) {
        const int64_t likeliest = argmax(logits, vocab);
        if (likeliest < 0) return 0;
        if (temperature == 0) return likeliest;
        values.resize(vocab);
        scale_row(logits, vocab, likeliest, temperature, values.data());
        const uint64_t key = stream_key(seed, position);
        constexpr float NO_FLOOR = -std::numeric_limits<float>::infinity();
        if (ids) return race(values.data(), vocab, NO_FLOOR, likeliest, key, [=](int64_t i) { return ids[i]; });
        return race(values.data(), vocab, NO_FLOOR, likeliest, key, [](int64_t i) { return i; });
    }

    const int64_t* const ids;
    std::vector<float> values, probabilities;
};

}  // namespace
