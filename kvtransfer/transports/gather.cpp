// Copies scattered blocks from one pool to another.
//
// A large copy bypasses the caches, as memcpy does for one large buffer. A plain store would first read its
// cache line from memory, which costs a third of the bandwidth, and would evict the model's data from the
// caches.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#if defined(__SSE2__)

constexpr int64_t LINE = 64, BURST = 256, PAGE = 4096, PAGES = 4;
constexpr int64_t SHORT_RUN = 64 * 1024;  // bytes; in longer runs address translation costs little

void stream_lines(char* target, const char* source, int64_t nbytes) {
    for (int64_t at = 0; at < nbytes; at += sizeof(__m128i)) {
        const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at));
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + at), part);
    }
}

// Copies from four pages in turn, so that their address translations overlap.
void stream_pages(char* target, const char* source) {
    for (int64_t at = 0; at < PAGE; at += BURST)
        for (int64_t page = 0; page < PAGES * PAGE; page += PAGE)
            stream_lines(target + page + at, source + page + at, BURST);
}

void stream(char* target, const char* source, int64_t nbytes) {
    int64_t done = std::min<int64_t>(nbytes, -reinterpret_cast<intptr_t>(target) & (LINE - 1));
    std::memcpy(target, source, done);
    if (nbytes <= SHORT_RUN)
        for (; done + PAGES * PAGE <= nbytes; done += PAGES * PAGE)
            stream_pages(target + done, source + done);
    const int64_t lines = (nbytes - done) / LINE * LINE;
    stream_lines(target + done, source + done, lines);
    done += lines;
    std::memcpy(target + done, source + done, nbytes - done);
}

void finish() { _mm_sfence(); }

#else

void stream(char* target, const char* source, int64_t nbytes) { std::memcpy(target, source, nbytes); }

void finish() {}

#endif

}  // namespace

// Copies the bytes [first, last) of `count` concatenated blocks. Blocks that are consecutive on both sides are
// one copy.
extern "C" void tandem_gather(char* target, const char* source, const int64_t* sources, const int64_t* targets,
                              int64_t count, int64_t block_bytes, int64_t first, int64_t last,
                              int32_t past_caches) {
    while (first < last) {
        const int64_t index = first / block_bytes, start = first % block_bytes;
        int64_t next = index + 1;
        while (next < count && sources[next] == sources[next - 1] + 1 && targets[next] == targets[next - 1] + 1)
            ++next;
        const int64_t nbytes = std::min(next * block_bytes, last) - first;
        char* there = target + targets[index] * block_bytes + start;
        const char* here = source + sources[index] * block_bytes + start;
        if (past_caches)
            stream(there, here, nbytes);
        else
            std::memcpy(there, here, nbytes);
        first += nbytes;
    }
    finish();
}
