// A token for each row of logits: sampler.py's choice in one call, with the filters of filters.py.

#include <atomic>
#include <functional>
#include <vector>

#include "choice.h"

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

constexpr int64_t SERIAL_LOGITS = 1 << 17;  // below so many, threads don't pay
constexpr int64_t LANES = 16;

// The parameters of a request that its tokens are drawn by.
struct Request {
    int64_t seed, top_k;  // 0: no filter
    double top_p;         // 1: no filter
    float temperature;    // 0: the likeliest token
    float min_p_floor;
};

struct Rows {
    const void* logits;
    int64_t stride, size, count;
    const Request* requests;
    const int64_t *numbers, *positions;  // each row's request, and its token's position
    int64_t* chosen;                     // -1 where no token has a finite score
};

// exp of what is at most 0, in vector code; relative error below 1e-14.
inline double exp_of(double x) {
    const double shifted = std::max(x, -700.0) * 1.4426950408889634 + 0x1.8p52;  // its last bits are the integer
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

// The sum of exp(value) over the values that are at least `floor`.
double mass_of(const float* __restrict values, int64_t size, float floor) {
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

// A thread's rows are chosen one by one, in the same memory.
class Chooser {
  public:
    template <class T> int64_t choose(const T* logits, int64_t size, const Request& request, int64_t position) {
        const int64_t likeliest = argmax(logits, size);
        if (likeliest < 0 || request.temperature == 0) return likeliest;
        values.resize(size);
        scale_row(logits, size, likeliest, request.temperature, values.data());
        const uint64_t key = stream_key(request.seed, position);
        return race(values.data(), size, floor_of(request), likeliest, key, [](int64_t i) { return i; });
    }

  private:
    // The least value that the request's filters leave.
    float floor_of(const Request& request) {
        float floor = request.min_p_floor;
        const bool has_top_k = request.top_k > 0 && request.top_k < int64_t(values.size());
        if (has_top_k) floor = std::max(floor, kth_greatest(request.top_k));
        if (request.top_p >= 1) return floor;
        if (!has_top_k) return nucleus_floor(values.data(), values.size(), floor, request.top_p);
        collect(values.data(), values.size(), floor, kept);
        return nucleus_floor(kept.data(), kept.size(), floor, request.top_p);
    }

    static void collect(const float* from, int64_t size, float floor, std::vector<float>& found) {
        found.clear();
        each_at_least(from, size, floor, [&](int64_t i) { found.push_back(from[i]); });
    }

    // Of the greatest of k groups or more, the k-th greatest is no greater than that of all.
    float kth_greatest(int64_t k) {
        const int64_t size = values.size(), groups = (4 * k + BLOCK - 1) / BLOCK * BLOCK;
        float bound = -std::numeric_limits<float>::infinity();
        if (2 * groups < size) {
            kept.assign(values.begin(), values.begin() + groups);
            for (int64_t first = groups; first < size; first += groups)
                keep_greater(kept.data(), values.data() + first, std::min(groups, size - first));
            bound = kth_of(kept, k);
        }
        collect(values.data(), size, bound, kept);
        return kth_of(kept, k);
    }

    static void keep_greater(float* __restrict kept, const float* __restrict others, int64_t size) {
        for (int64_t i = 0; i < size; i++) kept[i] = std::max(kept[i], others[i]);
    }

    static float kth_of(std::vector<float>& some, int64_t k) {
        std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
        return some[k - 1];
    }

    // The least value in the nucleus of those that are at least `floor`: before it in descending order there is less
    // than `top_p` of their mass.
    float nucleus_floor(const float* from, int64_t size, float floor, double top_p) {
        const double total = mass_of(from, size, floor), wanted = top_p * total;
        // Tokens each lighter than this weigh less than 1 - top_p together, so that the nucleus lies above.
        const double lightest = (total - wanted) / double(size);
        for (const double bound : {std::max(total * 0x1p-14, lightest), lightest}) {
            collect(from, size, std::max(floor, float(std::log(bound)) - 1e-3f), sorted);
            if (mass_of(sorted.data(), sorted.size(), floor) >= wanted) break;
        }
        return smallest_inside(sorted.data(), sorted.data() + sorted.size(), wanted);
    }

    // The last value in descending order before which there is less mass than `wanted`. The half that it lies in is
    // halved again, until there is little to sort.
    static float smallest_inside(float* first, float* last, double wanted) {
        while (last - first > LANES) {
            float* middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, std::greater<float>());
            const double mass = mass_of(first, middle - first, *middle);
            if (mass >= wanted) last = middle;
            else first = middle, wanted -= mass;
        }
        std::sort(first, last, std::greater<float>());
        for (; first + 1 < last && (wanted -= exp_of(double(*first))) > 0; first++) {}
        return *first;
    }

    std::vector<float> values, kept, sorted;
};

template <class T> void choose_rows(const Rows& rows, std::atomic<int64_t>& next) {
    static thread_local Chooser chooser;
    for (int64_t row; (row = next++) < rows.count;)
        rows.chosen[row] = chooser.choose(static_cast<const T*>(rows.logits) + row * rows.stride, rows.size,
                                          rows.requests[rows.numbers[row]], rows.positions[row]);
}

template <class T> int64_t choose(const Rows& rows, int64_t threads, Parallel parallel) {
    struct Job {
        const Rows& rows;
        std::atomic<int64_t> next{0};
    } job{rows};
    const auto work = [](void* self) { choose_rows<T>(static_cast<Job*>(self)->rows, static_cast<Job*>(self)->next); };
    if (threads <= 1 || rows.count == 1 || rows.count * rows.size < SERIAL_LOGITS || !parallel) work(&job);
    else parallel(work, &job, unsigned(std::min(threads, rows.count)), 0);
    return std::count(rows.chosen, rows.chosen + rows.count, -1);
}

}  // namespace

extern "C" {

// How many rows failed.
int64_t tandem_choose_bf16(const Rows* rows, int64_t threads, Parallel parallel) {
    return choose<bf16>(*rows, threads, parallel);
}

int64_t tandem_choose_float(const Rows* rows, int64_t threads, Parallel parallel) {
    return choose<float>(*rows, threads, parallel);
}
}
