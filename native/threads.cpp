// Threads that help with a caller's work while they have a core. The caller waits only for helpers that have begun, so
// another program on a core costs only that core's help; with OpenMP, each product would wait for all threads.

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <mutex>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace {

using Function = void (*)(void*);
using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t));

constexpr std::chrono::microseconds SPIN{200};  // products of a step follow each other faster than a thread wakes
constexpr int CHECKS = 32;                     // spins between two reads of the clock

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Returns when the word differs from `value`, or spuriously earlier.
void sleep_while(Word& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// Waits until the word differs from `value`: spins first, then sleeps. `sleepers` counts threads that need a wake-up.
uint32_t await_change(Word& word, uint32_t value, Word& sleepers) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < CHECKS; i++, relax())
            if (word != value) return word;
    } while (std::chrono::steady_clock::now() < end);
    sleepers++;
    while (word == value) sleep_while(word, value);
    sleepers--;
    return word;
}

class Helpers {
  public:
    void run(Function function, void* argument, unsigned threads) {
        const std::unique_lock lock(in_use, std::try_to_lock);
        if (!lock || threads < 2) return function(argument);
        this->function = function, this->argument = argument, most = threads - 1;
        for (; started < most; started++) start();
        left = 0;
        entered = OPEN;
        jobs++;
        if (sleeping) wake_all(jobs);
        function(argument);
        const uint32_t all = entered.fetch_and(~OPEN) & ~OPEN;
        for (uint32_t now = left; now != all;) now = await_change(left, now, waiting);
    }

    // Resets the state in a forked process, which has no helper threads yet.
    void forget() { new (this) Helpers; }

  private:
    static constexpr uint32_t OPEN = 1u << 31;

    void start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are left to the program's own threads
        std::thread([this] { help(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void help() {
        for (uint32_t seen = 0;; seen = await_change(jobs, seen, sleeping)) {
            seen = jobs;
            if (!enter()) continue;
            function(argument);
            left++;
            if (waiting) wake_all(left);
        }
    }

    bool enter() {
        uint32_t now = entered;
        do {
            if (!(now & OPEN) || (now & ~OPEN) >= most) return false;
        } while (!entered.compare_exchange_weak(now, now + 1));
        return true;
    }

    std::mutex in_use;
    unsigned started = 0;
    // The job, written only while no helper can enter.
    Function function = nullptr;
    void* argument = nullptr;
    std::atomic<uint32_t> most{0};
    alignas(64) Word jobs{0};     // jobs so far
    alignas(64) Word entered{0};  // helpers that have begun, with OPEN set while more may begin
    alignas(64) Word left{0};     // helpers that have ended
    Word sleeping{0}, waiting{0};
};

Helpers& helpers() {
    static Helpers* const all = [] {
        static Helpers helpers;
        pthread_atfork(nullptr, nullptr, [] { helpers.forget(); });
        return &helpers;
    }();
    return *all;
}

}  // namespace

// Calls the function on this thread and on up to `threads` - 1 helpers at the same time.
extern "C" void tandem_parallel(Function function, void* argument, unsigned threads, unsigned) {
    helpers().run(function, argument, threads);
}
