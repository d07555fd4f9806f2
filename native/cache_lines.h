// Vectors that begin at a cache line. Vectors and tiles of 64 bytes then do not lie across two lines, which would halve
// the speed of a product's loads.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include <sys/mman.h>

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

// For vectors that are kept, since large ones take whole huge pages: the rows of one tile lie on many small pages,
// whose addresses the CPU would translate one by one.
template <class T> struct InHugePages : AtCacheLines<T> {
    using AtCacheLines<T>::AtCacheLines;
    static constexpr size_t LARGE = 256 << 10, PAGE = 2 << 20;  // bytes

    T* allocate(size_t count) {
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::allocate(count);
        const size_t size = (count * sizeof(T) + PAGE - 1) / PAGE * PAGE;
        void* const memory = ::operator new(size, std::align_val_t(PAGE));
        madvise(memory, size, MADV_HUGEPAGE);  // without huge pages the memory is only slower
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t count) {
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::deallocate(memory, count);
        ::operator delete(memory, std::align_val_t(PAGE));
    }
};

}  // namespace
