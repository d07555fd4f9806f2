// Work on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

// Calls the function on the caller's thread and on up to `threads` - 1 other free threads. Returns when all calls have
// returned. Implemented by tandem_parallel (threads.cpp), or by OpenMP's GOMP_parallel, which waits for all threads.
using Parallel = void (*)(void (*function)(void*), void* argument, unsigned threads, unsigned flags);

// Calls work(thread) on up to `threads` threads, which share the work among themselves: one thread may do all of it.
// Each call gets a different `thread`, below `threads`.
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

// Hands out the numbers below `count` in ranges of decreasing length, so a late thread takes less.
class Ranges {
  public:
    Ranges(int64_t count, int64_t threads) : count(count), divisor(threads + 1) {}

    // Takes the next range. Returns false if none is left.
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
