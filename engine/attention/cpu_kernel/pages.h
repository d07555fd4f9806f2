// Backs the used part of the pool with huge pages. With small pages, reads of scattered blocks wait for address
// translation as long as for memory.
#pragma once

#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // Linux 6.1; older kernels refuse it, and the pages stay small
#endif

class HugePages {
  public:
    HugePages(void* pool, int64_t bytes) : base(uintptr_t(pool)), first((base + SIZE - 1) / SIZE) {
        const uintptr_t last = (base + bytes) / SIZE;
        done.resize(last > first ? last - first : 0);
    }

    // Asks for huge pages under these bytes of the pool, once for each page.
    void cover(int64_t offset, int64_t bytes) {
        for (uintptr_t page = (base + offset) / SIZE; page * SIZE < base + offset + bytes; page++) {
            if (page < first || page - first >= done.size() || done[page - first]) continue;
            done[page - first] = 1;
#if defined(__linux__)
            madvise((void*)(page * SIZE), SIZE, MADV_COLLAPSE);
#endif
        }
    }

  private:
    static constexpr uintptr_t SIZE = 2 << 20;
    uintptr_t base, first;  // the first whole huge page, as a page number
    std::vector<uint8_t> done;
};
