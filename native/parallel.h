// Work on the threads of torch's own OpenMP runtime.
#pragma once

#include <atomic>
#include <cstdint>

namespace {

// GOMP_parallel(function, argument, number of threads, flags) calls the function on each thread.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Calls work(thread) on each of `threads` threads; on this one alone if `parallel` is null.
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

// Calls work(i) for all i below `count`, on up to `threads` threads.
template <class Work> void share_out(int64_t count, int64_t threads, Parallel parallel, const Work& work) {
    std::atomic<int64_t> next{0};
    on_threads(threads, parallel, [&](int64_t) {
        for (int64_t i; (i = next++) < count;) work(i);
    });
}

}  // namespace
