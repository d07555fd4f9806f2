// Sampling of a token from a row of logits: the noise of noise.py, and `race` of torch_sampler.py. The compiler can
// vectorize the loops over a row, since sizes are passed by value and the output overlaps no other operand.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../native/exp.h"

namespace {

typedef uint16_t bf16;

constexpr int64_t BLOCK = 128;  // tokens that are skipped together
constexpr int64_t LANES = 16;   // partial sums

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// The noise.

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
constexpr float MAX_NOISE = 22.88f;   // an upper bound of the noise
constexpr float NOISE_SPAN = 26.03f;  // no noise lifts a token above one whose log probability is greater by this

// The draws of a speculative round other than the target's own tokens.
enum Purpose : int64_t { DRAFT = 1, ACCEPTANCE = 2, RECOVERY = 3 };

inline uint64_t mix_upper(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    return (x ^ (x >> 27)) * 0x94D049BB133111EBu;
}

inline uint64_t mix(uint64_t x) {
    x = mix_upper(x);
    return x ^ (x >> 31);
}

inline uint64_t stream_key(int64_t seed, int64_t position) {
    return mix(mix(uint64_t(seed)) + uint64_t(position + 1) * GAMMA);
}

// Returns the key of noise that no other purpose and no other round uses; the round began at `start`.
inline uint64_t round_key(int64_t seed, int64_t start, int64_t position, Purpose purpose) {
    const uint64_t of_purpose = stream_key(seed, -1 - purpose);  // at a position that no token has
    return stream_key(int64_t(stream_key(int64_t(of_purpose), start)), position);
}

inline int32_t noise_bits(uint64_t key, int64_t token) {
    return int32_t(mix_upper(key + uint64_t(token + 1) * GAMMA) >> 32);
}

inline double uniform_noise(uint64_t key, int64_t token) {
    return (double(noise_bits(key, token)) + 0x1p31 + 0.5) * 0x1p-32;
}

// 1 - uniform_noise, within 2^-24.
inline float tail_probability(uint64_t key, int64_t token) { return 0.5f - float(noise_bits(key, token)) * 0x1p-32f; }

inline float gumbel_noise(uint64_t key, int64_t token) {
    return float(-std::log(-std::log(uniform_noise(key, token))));
}

// Maps floats to integers in the same order; -0 comes just before 0.
inline int16_t order(bf16 value) { return int16_t(value ^ (int16_t(value) >> 15 & 0x7fff)); }

inline int32_t order(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

inline int16_t infinity_like(bf16) { return 0x7f80; }
inline int32_t infinity_like(float) { return 0x7f800000; }

// Returns the index of a row's greatest value, the first of equal ones; -1 if it is not finite or any value is NaN.
template <class T> int64_t argmax(const T* __restrict row, int64_t size) {
    using Order = decltype(order(T()));
    const Order infinity = infinity_like(T());
    Order most = std::numeric_limits<Order>::min(), least = std::numeric_limits<Order>::max();
    for (int64_t i = 0; i < size; i++) {
        most = std::max(most, order(row[i]));
        least = std::min(least, order(row[i]));
    }
    if (most >= infinity || most <= Order(~infinity) || least < Order(~infinity)) return -1;
    if (most == 0) most = -1;
    int64_t first = 0;
    for (; first + BLOCK <= size; first += BLOCK) {
        Order of_block = least;
        for (int64_t i = 0; i < BLOCK; i++) of_block = std::max(of_block, order(row[first + i]));
        if (of_block >= most) break;
    }
    while (order(row[first]) < most) first++;
    return first;
}

// Copies the logits of tokens whose mask bit is set; the others get -inf. The compiler vectorizes the loop over a word.
template <class T>
void mask_row(const T* __restrict row, int64_t size, const uint32_t* __restrict mask, float* __restrict masked) {
    const auto mask_some = [=](int64_t first, int64_t count) {
        const uint32_t bits = mask[first / 32];
        for (int64_t i = 0; i < count; i++)
            masked[first + i] = bits >> i & 1 ? widen(row[first + i]) : -std::numeric_limits<float>::infinity();
    };
    int64_t first = 0;
    for (; first + 32 <= size; first += 32) mask_some(first, 32);
    if (first < size) mask_some(first, size - first);
}

// Computes log-probabilities up to a constant; the greatest becomes 0.
template <class T>
void scale_row(const T* __restrict row, int64_t size, int64_t likeliest, float temperature, float* __restrict values) {
    const float top = widen(row[likeliest]);
    for (int64_t i = 0; i < size; i++) values[i] = (widen(row[i]) - top) / temperature;
}

// Computes the distribution that a token is drawn from. `values` are those of scale_row; those below `floor` get 0.
inline void softmax(const float* __restrict values, int64_t size, float floor, float* __restrict probabilities) {
    floor = std::max(floor, -NOISE_SPAN);
    for (int64_t i = 0; i < size; i++) probabilities[i] = values[i] >= floor ? exp_of(values[i]) : 0;
    double sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += double(probabilities[i + lane]);
    double total = 0;
    for (; i < size; i++) total += double(probabilities[i]);
    for (const double sum : sums) total += sum;
    const float factor = float(1 / total);
    for (int64_t j = 0; j < size; j++) probabilities[j] *= factor;
}

inline int64_t count_at_least(const float* __restrict values, int64_t size, float floor) {
    int32_t count = 0;
    for (int64_t i = 0; i < size; i++) count += values[i] >= floor;
    return count;
}

// Calls visit(i) for all values that are at least `floor`.
template <class Visit> void each_at_least(const float* values, int64_t size, float floor, const Visit& visit) {
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t last = std::min(first + BLOCK, size);
        if (!count_at_least(values + first, last - first, floor)) continue;
        for (int64_t i = first; i < last; i++)
            if (values[i] >= floor) visit(i);
    }
}

// Returns the index with the greatest value + noise among values of at least `floor`, the first of equal ones. `values`
// are those of scale_row; index i has the noise of token_id(i). Logarithms are computed only for tokens that the noise
// may lift above the likeliest one's score: -log u is at least 1 - u.
template <class TokenId>
int64_t race(const float* values, int64_t size, float floor, int64_t likeliest, uint64_t key, const TokenId& token_id) {
    int64_t best = likeliest;
    float best_score = values[likeliest] + gumbel_noise(key, token_id(likeliest));
    const float bar = best_score - 1e-4f;
    floor = std::max(floor, bar - MAX_NOISE);
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = std::min(BLOCK, size - first);
        const float* __restrict value = values + first;
        if (!count_at_least(value, count, floor)) continue;
        float lifts[BLOCK];  // at least 0 if the noise may lift the token above the bar
        for (int64_t i = 0; i < count; i++) {
            const float tail = tail_probability(key, token_id(first + i));
            lifts[i] = value[i] >= floor ? exp_of(value[i] - bar) - tail : -1;
        }
        each_at_least(lifts, count, -1e-6f, [&](int64_t i) {
            const float score = value[i] + gumbel_noise(key, token_id(first + i));
            if (score > best_score || (score == best_score && first + i < best)) best = first + i, best_score = score;
        });
    }
    return best;
}

// Draws a token with a probability proportional to its weight: the token with the least -log u / weight, which is also
// the one with the greatest log(weight) + Gumbel noise. Returns -1 if all weights are 0.
inline int64_t draw(const float* weights, int64_t size, uint64_t key) {
    int64_t best = argmax(weights, size);
    if (best < 0 || weights[best] <= 0) return -1;
    const auto wait = [=](int64_t i) { return -std::log(uniform_noise(key, i)) / double(weights[i]); };
    double shortest = wait(best);
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t count = std::min(BLOCK, size - first);
        const float* __restrict weight = weights + first;
        const float bar = float(shortest);
        float lifts[BLOCK];  // at least 0 if the noise may make the wait shorter: -log u is at least 1 - u
        for (int64_t i = 0; i < count; i++) lifts[i] = weight[i] * bar - tail_probability(key, first + i);
        each_at_least(lifts, count, -1e-6f, [&](int64_t i) {
            const double found = wait(first + i);
            if (found < shortest || (found == shortest && first + i < best)) best = first + i, shortest = found;
        });
    }
    return best;
}

}  // namespace
