// Work on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

// Calls the function on the caller's thread, and on up to `threads` - 1 others that are free. Returns when all have.
// That is tandem_parallel (threads.cpp), or OpenMP's GOMP_parallel, which waits for all threads.
using Parallel = void (*)(void (*function)(void*), void* argument, unsigned threads, unsigned flags);

// Calls work(thread) on up to `threads` threads, which share out the work among themselves: one may do it all.
// `thread` is below `threads`, and unlike on each.
template <class Work> void on_threads(int64_t threads, Parallel parallel, const Work& work) {
    if (threads <= 1 || !parallel) return work(0);
    struct Job {
        const Work& work;
        std::atomic<int64_t> next_thread{0};
    } job{work};
    auto run = [](void* self) {
        auto* job = static_cast<Job*>(self);
        job->work(job->next_thread++);
    };
    parallel(run, &job, unsigned(threads), 0);
}

// Hands out the numbers below `count` in ranges, long ones first: a thread that comes late takes less.
class Ranges {
  public:
    Ranges(int64_t count, int64_t threads) : count(count), divisor(threads + 1) {}

    // Whether there was a range left.
    bool take(int64_t& begin, int64_t& end) {
        begin = next.load();
        do {
            if (begin >= count) return false;
            end = begin + std::max<int64_t>((count - begin) / divisor, 1);
        } while (!next.compare_exchange_weak(begin, end));
        return true;
    }

  private:
    const int64_t count, divisor;
    std::atomic<int64_t> next{0};
};

// Calls work(i) for all i below `count`, on up to `threads` threads.
template <class Work> void share_out(int64_t count, int64_t threads, Parallel parallel, const Work& work) {
    std::atomic<int64_t> next{0};
    on_threads(threads, parallel, [&](int64_t) {
        for (int64_t i; (i = next++) < count;) work(i);
    });
}

}  // namespace
