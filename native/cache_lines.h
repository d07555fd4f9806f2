// Vectors that begin at a cache line. Vectors and tiles of 64 bytes then do not lie across two lines, which would halve
// the speed of a product's loads.
#pragma once

#include <cstddef>
#include <cstdint>
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
// whose addresses the CPU would translate one by one. Large memory is mapped apart from the heap, where blocks with this
// alignment would leave gaps that stay in use.
template <class T> struct InHugePages : AtCacheLines<T> {
    using AtCacheLines<T>::AtCacheLines;
    static constexpr size_t LARGE = 256 << 10, PAGE = 2 << 20;  // bytes

    T* allocate(size_t count) {
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::allocate(count);
        const size_t size = whole_pages(count);
        void* const mapped = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        char* const begin = static_cast<char*>(mapped);
        const size_t before = -reinterpret_cast<uintptr_t>(begin) % PAGE;
        if (before) munmap(begin, before);
        munmap(begin + before + size, PAGE - before);
        madvise(begin + before, size, MADV_HUGEPAGE);  // without huge pages the memory is only slower
        return reinterpret_cast<T*>(begin + before);
    }
    void deallocate(T* memory, size_t count) {
        if (count * sizeof(T) < LARGE) return AtCacheLines<T>::deallocate(memory, count);
        munmap(memory, whole_pages(count));
    }

  private:
    static size_t whole_pages(size_t count) { return (count * sizeof(T) + PAGE - 1) / PAGE * PAGE; }
};

}  // namespace
