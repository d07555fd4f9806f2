// Verifies draft chains in one call, row by row up to the first rejection: by the coupled rule of verify.py,
// or by the standard rule of rejection.py.

#include <vector>

#include "../../engine/sampler/chooser.h"

namespace {

// For each sequence: the row after its last token, then one row after each draft token.
struct Chains {
    const void* logits;
    int64_t stride, size, count;
    const Sampling* requests;
    const int64_t *positions, *lengths;  // of each sequence's next token, and of its chain
    const float* const* distributions;   // [length, size]: what each token was drawn from; null: drawn without chance
    const int64_t* token_ids;            // one chain after the other
    int64_t *accepted, *last_tokens;     // the number of tokens; the token after them, -1 if none has a finite score
    const uint32_t* const* masks;        // for each row, bits of the tokens that may be chosen (null: all); or null
    int64_t coupled;                     // whether to verify by the coupled rule
};

template <class T> struct Chain {
    const T* logits;
    int64_t stride, size, position, length;
    const int64_t* token_ids;
    const float* distributions;
    const uint32_t* const* masks;

    RowEdits edits(int64_t row) const { return edits_of({}, row, masks ? masks[row] : nullptr); }
};

struct Outcome {
    int64_t accepted, last_token;
};

// The coupled rule: accepts draft tokens as long as they are the target's own.
template <class T> Outcome follow(const Chain<T>& chain, const Sampling& request, Chooser& chooser) {
    for (int64_t i = 0;; i++) {
        const T* row = chain.logits + i * chain.stride;
        const int64_t token = chooser.choose(row, chain.size, request, chain.position + i, chain.edits(i));
        if (token < 0 || i == chain.length || token != chain.token_ids[i]) return {i, token};
    }
}

// The target's distribution minus the one that a rejected token was drawn from, not normalized.
void take_away(const float* __restrict target, const float* __restrict drawn, int64_t size, float* __restrict left) {
    for (int64_t i = 0; i < size; i++) left[i] = std::max(target[i] - drawn[i], 0.0f);
}

template <class T> Outcome judge(const Chain<T>& chain, const Sampling& request, Chooser& chooser) {
    static thread_local std::vector<float> target, left;
    const int64_t size = chain.size, start = chain.position;
    target.resize(size), left.resize(size);
    for (int64_t i = 0;; i++) {
        const T* row = chain.logits + i * chain.stride;
        if (!chooser.distribution(row, size, request, target.data(), chain.edits(i))) return {i, -1};
        const uint64_t recovery = round_key(request.seed, start, start + i, RECOVERY);
        if (i == chain.length) return {i, draw(target.data(), size, recovery)};
        const int64_t token = chain.token_ids[i];
        const float* drawn = chain.distributions ? chain.distributions + i * size : nullptr;
        const double q = drawn ? std::max(drawn[token], std::numeric_limits<float>::min()) : 1;
        if (uniform_noise(round_key(request.seed, start, start + i, ACCEPTANCE), token) * q < target[token]) continue;
        if (drawn) {
            take_away(target.data(), drawn, size, left.data());
        } else {
            left = target;
            left[token] = 0;
        }
        const int64_t last_token = draw(left.data(), size, recovery);
        return {i, last_token < 0 ? draw(target.data(), size, recovery) : last_token};  // rounding may leave nothing
    }
}

template <class T> void verify(const Chains& chains, int64_t threads, Parallel parallel) {
    std::vector<int64_t> tokens_before(1, 0);
    for (int64_t s = 0; s < chains.count; s++) tokens_before.push_back(tokens_before.back() + chains.lengths[s]);
    const int64_t num_rows = tokens_before.back() + chains.count;
    with_choosers(chains.count, num_rows * chains.size, threads, parallel, [&](int64_t s, Chooser& chooser) {
        const int64_t before = tokens_before[s];
        const T* logits = static_cast<const T*>(chains.logits) + (before + s) * chains.stride;
        const Chain<T> chain{logits, chains.stride, chains.size, chains.positions[s], chains.lengths[s],
                             chains.token_ids + before, chains.distributions[s],
                             chains.masks ? chains.masks + before + s : nullptr};
        const Sampling& request = chains.requests[s];
        const bool is_coupled = chains.coupled || chain.length == 0 || request.temperature == 0;
        const Outcome outcome = is_coupled ? follow(chain, request, chooser) : judge(chain, request, chooser);
        chains.accepted[s] = outcome.accepted, chains.last_tokens[s] = outcome.last_token;
    });
}

}  // namespace

extern "C" {

int64_t tandem_verify_bf16(const Chains* chains, int64_t threads, Parallel parallel) {
    verify<bf16>(*chains, threads, parallel);
    return 0;
}

int64_t tandem_verify_float(const Chains* chains, int64_t threads, Parallel parallel) {
    verify<float>(*chains, threads, parallel);
    return 0;
}
}
