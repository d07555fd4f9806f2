// The selection of a row's experts, and their weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "row_math.h"
#include "structs.h"

namespace {

// The function that turns logits into scores. With SOFTMAX a row's scores sum to 1, with CHOSEN_SOFTMAX those selected.
enum Score : int64_t { SOFTMAX, SIGMOID, CHOSEN_SOFTMAX };

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Writes the indices of the `count` highest values to `places`, highest first; the lower index wins a tie.
inline void highest(const std::vector<float>& values, int64_t count, std::vector<int64_t>& places) {
    places.resize(values.size());
    std::iota(places.begin(), places.end(), 0);
    std::partial_sort(places.begin(), places.begin() + count, places.end(), [&](int64_t a, int64_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
}

inline void softmax_row(float* row, int64_t size) {
    const float most = *std::max_element(row, row + size);
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += row[i] = exp_of(row[i] - most);
    for (int64_t i = 0; i < size; i++) row[i] /= sum;
}

inline void sigmoid_row(float* row, int64_t size, bool rounds) {
    for (int64_t i = 0; i < size; i++) {
        const float score = 1 / (1 + exp_of(-row[i]));
        row[i] = rounds ? rounded(score) : score;
    }
}

class Routing {
  public:
    // Turns one row's logits into scores, and writes the `chosen` experts and the `weights` of their outputs.
    void choose(const Experts& experts, float* scores, int64_t* chosen, float* weights) {
        if (experts.score == SOFTMAX) softmax_row(scores, experts.count);
        else if (experts.score == SIGMOID) sigmoid_row(scores, experts.count, experts.rounds);
        ranks.resize(experts.count);
        for (int64_t e = 0; e < experts.count; e++) {
            const float rank = scores[e] + (experts.preferences ? experts.preferences[e] : 0);
            ranks[e] = rank == rank ? rank : LOWEST;  // sorting needs an order
        }
        if (experts.open_groups < experts.groups) close_groups(experts);
        highest(ranks, experts.chosen, places);
        for (int64_t i = 0; i < experts.chosen; i++) chosen[i] = places[i], weights[i] = scores[places[i]];
        if (experts.score == CHOSEN_SOFTMAX) softmax_row(weights, experts.chosen);
        float sum = experts.normalizes ? experts.least_sum : 1;
        for (int64_t i = 0; experts.normalizes && i < experts.chosen; i++) sum += weights[i];
        for (int64_t i = 0; i < experts.chosen; i++) {
            weights[i] = weights[i] / sum * experts.scaling;
            if (experts.rounds) weights[i] = rounded(weights[i]);
        }
    }

  private:
    // Excludes all groups except the best. A group ranks by the sum of its two best experts (DeepSeek-V3, 2024).
    void close_groups(const Experts& experts) {
        const int64_t size = experts.count / experts.groups;
        group_ranks.resize(experts.groups);
        for (int64_t g = 0; g < experts.groups; g++) {
            float first = LOWEST, second = LOWEST;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                second = std::max(second, std::min(first, ranks[e]));
                first = std::max(first, ranks[e]);
            }
            group_ranks[g] = first + second;
        }
        highest(group_ranks, experts.groups, places);
        for (int64_t i = experts.open_groups; i < experts.groups; i++)
            std::fill_n(ranks.begin() + places[i] * size, size, LOWEST);
    }

    std::vector<float> ranks, group_ranks;
    std::vector<int64_t> places;
};

}  // namespace
