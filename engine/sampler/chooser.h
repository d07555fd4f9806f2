// Sampling of a row's token, and its distribution, by a request's parameters, with the filters of torch_sampler.py. The
// rows are spread over threads.
#pragma once

#include <functional>
#include <vector>

#include "../../native/parallel.h"
#include "choice.h"

namespace {

constexpr int64_t SERIAL_LOGITS = 1 << 17;  // with fewer logits, one thread is faster

// A request's sampling parameters.
struct Sampling {
    int64_t seed, top_k;  // 0: no filter
    double top_p;         // 1: no filter
    float temperature;    // 0: greedy
    float min_p_floor;
};

// Returns exp(x) for x <= 0 with a relative error below 1e-14, in a form that the compiler vectorizes.
inline double exp_of(double x) {
    const double shifted = std::max(x, -700.0) * 1.4426950408889634 + 0x1.8p52;  // low bits: the rounded integer
    const double n = shifted - 0x1.8p52;
    const double r = (std::max(x, -700.0) - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    constexpr double F[] = {1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
                            1. / 3628800, 1. / 39916800};
    const double high = F[4] + r * (F[5] + r * (F[6] + r * (F[7] + r * (F[8] + r * F[9]))));
    const double p = 1 + r * (1 + r * (F[0] + r * (F[1] + r * (F[2] + r * (F[3] + r * high)))));
    uint64_t bits;
    memcpy(&bits, &shifted, 8);
    bits = (bits + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return p * scale;
}

// Returns the sum of exp(value) over the values that are at least `floor`.
inline double mass_of(const float* __restrict values, int64_t size, float floor) {
    double sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            sums[lane] += values[i + lane] >= floor ? exp_of(double(values[i + lane])) : 0;
    double mass = 0;
    for (; i < size; i++) mass += values[i] >= floor ? exp_of(double(values[i])) : 0;
    for (const double sum : sums) mass += sum;
    return mass;
}

// Copies the values for which keep(value) holds to `kept`, which may be `values`, and returns their number.
template <class Keep> int64_t copy_some(const float* values, int64_t size, float* kept, const Keep& keep) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) {
        const float value = values[i];
        kept[count] = value;
        count += keep(value);
    }
    return count;
}

inline int64_t copy_at_least(const float* values, int64_t size, float floor, float* kept) {
    int64_t count = 0;
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t of_block = std::min(BLOCK, size - first);
        if (!count_at_least(values + first, of_block, floor)) continue;
        count += copy_some(values + first, of_block, kept + count, [=](float value) { return value >= floor; });
    }
    return count;
}

inline void keep_greater(float* __restrict kept, const float* __restrict others, int64_t size) {
    for (int64_t i = 0; i < size; i++) kept[i] = std::max(kept[i], others[i]);
}

inline float kth_of(float* some, int64_t size, int64_t k) {
    std::nth_element(some, some + (k - 1), some + size, std::greater<float>());
    return some[k - 1];
}

// Returns the last of `size` values from `low` to 0, in descending order, before which the mass is less than `wanted`.
// The range is halved until few values remain to be sorted.
inline float smallest_inside(float* some, int64_t size, float low, double wanted) {
    for (float high = 0; size > LANES;) {
        const float middle = (low + high) / 2;
        if (!(low < middle && middle < high)) break;
        const double mass = mass_of(some, size, middle);
        if (mass >= wanted || count_at_least(some, size, middle) == size) {  // the latter if sums were rounded
            low = middle;
            size = copy_some(some, size, some, [=](float value) { return value >= middle; });
        } else {
            high = middle, wanted -= mass;
            size = copy_some(some, size, some, [=](float value) { return value < middle; });
        }
    }
    std::sort(some, some + size, std::greater<float>());
    int64_t i = 0;
    while (i + 1 < size && (wanted -= exp_of(double(some[i]))) > 0) i++;
    return some[i];
}

// The edits of a batch's rows, from `EditLists` of edits.py. `bounds[5 * i]` to `bounds[5 * i + 3]` are the beginnings
// of row i's four lists, `bounds[5 * i + 4]` is the end of the last. Null: no edits.
struct Edits {
    const int32_t *bounds, *tokens;
    const float *amounts, *factors;
};

// One row's part of `Edits`, and the bits of the tokens that may be chosen; null: all.
struct RowEdits {
    const int32_t *bounds, *tokens;
    const float *amounts, *factors;
    const uint32_t* mask;

    bool has_lists() const { return bounds && bounds[0] < bounds[4]; }
};

inline RowEdits edits_of(const Edits& edits, int64_t row, const uint32_t* mask) {
    if (!edits.bounds) return {nullptr, nullptr, nullptr, nullptr, mask};
    return {edits.bounds + 5 * row, edits.tokens, edits.amounts, edits.factors + 3 * row, mask};
}

// Writes the logits as floats with the lists' edits, rounded like torch's operators.
template <class T> void edit_row(const T* row, int64_t size, const RowEdits& edits, float* edited) {
    const auto each = [&](int64_t list, const auto& edit) {
        for (int64_t i = edits.bounds[list]; i < edits.bounds[list + 1]; i++)
            if (uint32_t(edits.tokens[i]) < size) edit(edits.tokens[i], edits.amounts[i]);
    };
    constexpr float FORBIDDEN = -std::numeric_limits<float>::infinity();
    if (edits.bounds[0] < edits.bounds[1])
        std::fill_n(edited, size, FORBIDDEN);
    else
        for (int64_t i = 0; i < size; i++) edited[i] = widen(row[i]);
    each(0, [&](int32_t token, float) { edited[token] = widen(row[token]); });
    each(1, [&](int32_t token, float bias) { edited[token] += bias; });
    each(2, [&](int32_t token, float) { edited[token] = FORBIDDEN; });
    const float repetition = edits.factors[0], presence = edits.factors[1], frequency = edits.factors[2];
    each(3, [&](int32_t token, float count) {
        const float old = edited[token];
        volatile float scaled = old > 0 ? old / repetition : old * repetition;  // no product is fused with a sum
        volatile float often = frequency * count;
        edited[token] = scaled - (often + (count > 0 ? presence : 0.0f));
    });
}

// Sampler of one thread. It handles one row at a time and reuses its buffers.
class Chooser {
  public:
    // Returns a row's token; -1 if no token has a finite score.
    template <class T>
    int64_t choose(const T* logits, int64_t size, const Sampling& request, int64_t position, const RowEdits& edits) {
        if (edits.has_lists() || edits.mask) return choose(changed(logits, size, edits), size, request, position, {});
        const int64_t likeliest = argmax(logits, size);
        if (likeliest < 0 || request.temperature == 0) return likeliest;
        scale(logits, size, likeliest, request.temperature);
        const uint64_t key = stream_key(request.seed, position);
        return race(values.data(), size, floor_of(request, size), likeliest, key, [](int64_t i) { return i; });
    }

    // Writes the distribution that `choose` draws from; returns false if no token has a finite score.
    template <class T>
    bool distribution(const T* logits, int64_t size, const Sampling& request, float* probabilities,
                      const RowEdits& edits) {
        if (edits.has_lists() || edits.mask)
            return distribution(changed(logits, size, edits), size, request, probabilities, {});
        const int64_t likeliest = argmax(logits, size);
        if (likeliest < 0) return false;
        if (request.temperature == 0) {
            std::fill_n(probabilities, size, 0.0f);
            probabilities[likeliest] = 1;
            return true;
        }
        scale(logits, size, likeliest, request.temperature);
        softmax(values.data(), size, floor_of(request, size), probabilities);
        return true;
    }

  private:
    template <class T> const float* changed(const T* logits, int64_t size, const RowEdits& edits) {
        if (edits.has_lists()) {
            edited.resize(size);
            edit_row(logits, size, edits, edited.data());
            if (!edits.mask) return edited.data();
            return changed(edited.data(), size, {nullptr, nullptr, nullptr, nullptr, edits.mask});
        }
        allowed.resize(size);
        mask_row(logits, size, edits.mask, allowed.data());
        return allowed.data();
    }

    template <class T> void scale(const T* logits, int64_t size, int64_t likeliest, float temperature) {
        values.resize(size), kept.resize(size), some.resize(size);
        scale_row(logits, size, likeliest, temperature, values.data());
    }

    // Returns the least value that passes the request's filters.
    float floor_of(const Sampling& request, int64_t size) {
        float floor = request.min_p_floor;
        const bool has_top_k = request.top_k > 0 && request.top_k < size;
        if (has_top_k) floor = std::max(floor, kth_greatest(size, request.top_k));
        if (request.top_p >= 1) return floor;
        if (!has_top_k) return nucleus_floor(values.data(), size, floor, request.top_p);
        const int64_t count = copy_at_least(values.data(), size, floor, kept.data());
        return nucleus_floor(kept.data(), count, floor, request.top_p);
    }

    // Returns the k-th greatest value. A lower bound is the k-th greatest of the maxima of at least k groups.
    float kth_greatest(int64_t size, int64_t k) {
        const int64_t groups = (4 * k + BLOCK - 1) / BLOCK * BLOCK;
        float bound = -std::numeric_limits<float>::infinity();
        if (2 * groups < size) {
            std::copy_n(values.data(), groups, some.data());
            for (int64_t first = groups; first < size; first += groups)
                keep_greater(some.data(), values.data() + first, std::min(groups, size - first));
            bound = kth_of(some.data(), groups, k);
        }
        return kth_of(some.data(), copy_at_least(values.data(), size, bound, some.data()), k);
    }

    // Returns the least value in the nucleus of the values that are at least `floor`: the greater values have less than
    // `top_p` of the mass.
    float nucleus_floor(const float* from, int64_t size, float floor, double top_p) {
        const double total = mass_of(from, size, floor), wanted = top_p * total;
        // All tokens lighter than this together weigh less than 1 - top_p, so the nucleus is above it.
        const double lightest = (total - wanted) / double(size);
        float low = floor;
        int64_t count = 0;
        for (const double bound : {std::max(total * 0x1p-14, lightest), lightest}) {
            low = std::max(floor, float(std::log(bound)) - 1e-3f);
            count = copy_at_least(from, size, low, some.data());
            if (mass_of(some.data(), count, low) >= wanted) break;
        }
        return smallest_inside(some.data(), count, low, wanted);
    }

    std::vector<float> values, kept, some, edited, allowed;
};

// Calls work(i, chooser) for all i below `count`; the calls together read `num_logits` logits.
template <class Work>
void with_choosers(int64_t count, int64_t num_logits, int64_t threads, Parallel parallel, const Work& work) {
    const int64_t wanted = num_logits < SERIAL_LOGITS ? 1 : std::min(threads, count);
    share_out(count, wanted, parallel, [&](int64_t i) {
        static thread_local Chooser chooser;
        work(i, chooser);
    });
}

}  // namespace
