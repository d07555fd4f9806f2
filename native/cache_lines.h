// Vectors that begin at a cache line. Vectors and tiles of 64 bytes then do not lie across two lines, which would halve
// the speed of a product's loads.
#pragma once

#include <cstddef>
#include <new>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

template <class T> struct AtCacheLines {
    using value_type = T;
    static constexpr std::align_val_t LINE{64};

    AtCacheLines() = default;
    template <class Other> AtCacheLines(const AtCacheLines<Other>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), LINE)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, LINE); }
    bool operator==(const AtCacheLines&) const { return true; }
    bool operator!=(const AtCacheLines&) const { return false; }
};

template <class T> using AlignedVector = std::vector<T, AtCacheLines<T>>;

// For vectors that are kept: large ones get huge pages from Linux, since the rows of one tile lie on many small pages.
template <class T> struct InHugePages : AtCacheLines<T> {
    using AtCacheLines<T>::AtCacheLines;
    static constexpr size_t LARGE = 256 << 10, PAGE = 2 << 20;  // bytes

    T* allocate(size_t count) {
        const size_t pages = (count * sizeof(T) + PAGE - 1) / PAGE;
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::allocate(count);
        void* const memory = ::operator new(pages * PAGE, std::align_val_t(PAGE));
#if defined(MADV_HUGEPAGE)
        madvise(memory, pages * PAGE, MADV_HUGEPAGE);
#endif
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t count) {
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::deallocate(memory, count);
        ::operator delete(memory, std::align_val_t(PAGE));
    }
};

}  // namespace
