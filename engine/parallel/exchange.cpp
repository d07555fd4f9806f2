// Gathers rows among the ranks of a worker: processes of one host that each have some columns, and that map common
// memory. Each rank copies its columns to their place there and, when all have done so, copies the whole rows.
//
// Two rooms take turns: a rank may write for the next gather while others still read this one, but no rank still reads
// the gather before. Ranks do the same work at the same time, so a waiting rank spins for a moment. Then it sleeps on a
// futex, since there may be more ranks than cores.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t AT_ONCE = 1 << 18;          // bytes of rows that are exchanged at once: they stay in the cache
constexpr int64_t SPIN_NS = 20'000;           // about the cost of sleeping and being woken
constexpr int64_t LOOK_NS = 100'000'000;      // the interval at which a sleeper checks for a lost rank

// The start of the shared memory, initially zero. `arrived` wraps around.
struct Shared {
    alignas(64) std::atomic<uint32_t> arrived;  // arrivals of ranks at gathers
    alignas(64) std::atomic<uint32_t> sleepers;
    std::atomic<uint32_t> is_lost;  // a rank has ended or does not answer, so all further gathers fail
};

// One rank's view.
struct Exchange {
    Shared* shared;
    char* rooms;
    int64_t room_bytes, ranks, timeout_ns;
    int64_t gathers;  // so far
};

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    const timespec most{0, LOOK_NS};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

// Waits for all ranks to arrive. Returns false if one is lost.
bool meet(Exchange& e) {
    Shared& shared = *e.shared;
    const uint32_t goal = uint32_t(++e.gathers) * uint32_t(e.ranks);
    if (shared.arrived.fetch_add(1) + 1 == goal) {
        if (shared.sleepers.load()) syscall(SYS_futex, &shared.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
        return true;
    }
    const int64_t began = now_ns();
    for (;;) {
        const uint32_t arrived = shared.arrived.load();
        if (int32_t(arrived - goal) >= 0) return true;
        if (shared.is_lost.load()) return false;
        const int64_t waited = now_ns() - began;
        if (waited > e.timeout_ns) {
            shared.is_lost.store(1);
            return false;
        }
        if (waited < SPIN_NS) continue;
        shared.sleepers.fetch_add(1);
        sleep_while(shared.arrived, arrived);
        shared.sleepers.fetch_sub(1);
    }
}

}  // namespace

extern "C" {

// Fills `whole` with `rows` rows of `width` bytes, once all ranks have called this for the same rows. This rank has
// `own` bytes of each row from byte `first` on, contiguous in `part`. Returns false if a rank is lost.
bool tandem_gather(Exchange* e, const char* part, char* whole, int64_t rows, int64_t first, int64_t own, int64_t width) {
    const int64_t most = std::max<int64_t>(AT_ONCE / width, 1);
    for (int64_t begin = 0; begin < rows; begin += most) {
        const int64_t end = std::min(begin + most, rows);
        char* room = e->rooms + e->gathers % 2 * e->room_bytes;
        for (int64_t row = begin; row < end; row++)
            memcpy(room + (row - begin) * width + first, part + row * own, own);
        if (e->shared->is_lost.load() || !meet(*e)) return false;
        memcpy(whole + begin * width, room, (end - begin) * width);
    }
    return true;
}

bool tandem_is_lost(const Exchange* e) { return e->shared->is_lost.load(); }

// Makes all ranks stop waiting.
void tandem_give_up(Exchange* e) { e->shared->is_lost.store(1); }
}
