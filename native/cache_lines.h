// Vectors that begin at a cache line. Vectors and tiles of 64 bytes then do not lie across two lines, which would halve
// the speed of a product's loads.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

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

}  // namespace
