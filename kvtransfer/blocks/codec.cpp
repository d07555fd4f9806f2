// A lossless code for bf16 values: an exponent takes three bits if it is in a window of seven; the sign and the
// mantissa stay as they are.
//
// A group of 256 values is
//
//     1 byte     the window's lowest exponent, or PLAIN: then the values follow unchanged
//     96 bytes   the codes: the exponent's index in the window, or OUTSIDE
//     256 bytes  the mantissas, each with its sign as the lowest bit
//     n bytes    the exponents outside of the window, in order
//
// Values are taken in rows of 32. In a row, value i and value 16 + i are neighbours, so that all steps work on
// whole vectors of 16-bit numbers without shuffles. Bytes after the last whole group of a block are not coded.

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace {

typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint16_t Words __attribute__((vector_size(32)));

constexpr int ROWS = 8, ROW = 32, GROUP_BYTES = ROWS * ROW * 2, CODES_BYTES = 3 * ROW;
constexpr int HEAD_BYTES = 1 + CODES_BYTES + ROWS * ROW, PLAIN_BYTES = 1 + GROUP_BYTES;
constexpr uint8_t OUTSIDE = 7, PLAIN = 255, USUAL_WINDOW = 121;
constexpr int MANY = ROWS * ROW / 16, PAIR = 2 * ROW, STEP = 8, SLACK = STEP;

template <class Vector> Vector load(const void* source) {
    Vector vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
}

template <class Vector> void store(void* target, const Vector& vector) {
    std::memcpy(target, &vector, sizeof vector);
}

// Returns one bit per byte of two rows. Each byte is all ones or zero.
uint64_t bits_of(const Bytes& first, const Bytes& second) {
#if defined(__SSE2__)
    __m128i parts[4];
    std::memcpy(parts, &first, sizeof first);
    std::memcpy(parts + 2, &second, sizeof second);
    uint64_t bits = 0;
    for (int i = 3; i >= 0; i--) bits = bits << 16 | uint32_t(_mm_movemask_epi8(parts[i]));
    return bits;
#else
    uint64_t bits = 0;
    for (int i = 0; i < ROW; i++) bits |= uint64_t(first[i] & 1) << i | uint64_t(second[i] & 1) << (ROW + i);
    return bits;
#endif
}

// Calls visit(n, i) for the n-th set bit i, then up to STEP - 1 times with i = PAIR, so that a step has no branches.
// Most pairs of rows take one step. Returns the number of set bits.
template <class Visit> int each(uint64_t bits, const Visit& visit) {
    const int count = __builtin_popcountll(bits);
    for (int done = 0; done < count; done += STEP)
        for (int n = done; n < done + STEP; n++, bits &= bits - 1) visit(n, bits ? __builtin_ctzll(bits) : PAIR);
    return count;
}

// Counts the exponents outside of the window, for each column of the rows.
Bytes count_outside(const Bytes* exponents, uint8_t window) {
    Bytes counts{};
    for (int row = 0; row < ROWS; row++) counts -= Bytes(exponents[row] - window >= OUTSIDE);
    return counts;
}

int total(const Bytes& counts) {
    uint64_t parts[4], bytes = 0;
    std::memcpy(parts, &counts, sizeof parts);
    for (const uint64_t part : parts) bytes += part;
    const uint64_t pairs = (bytes & 0x00ff00ff00ff00ff) + (bytes >> 8 & 0x00ff00ff00ff00ff);
    return int(pairs * 0x0001000100010001 >> 48);
}

// Moves the window while that leaves fewer exponents outside. Returns the number left outside.
int climb(const Bytes* exponents, uint8_t& window) {
    for (;;) {
        Bytes counts[3];
        for (int i = 0; i < 3; i++) counts[i] = count_outside(exponents, window + i - 1);
        const int below = total(counts[0]), here = total(counts[1]), above = total(counts[2]);
        if (here <= std::min(below, above)) return here;
        window += below < above ? -1 : 1;
    }
}

// `window` is the previous group's. Returns the bytes written, at most PLAIN_BYTES; some bytes after them change, too.
int64_t encode_group(uint8_t* out, const char* values, uint8_t& window) {
    Bytes exponents[ROWS], mantissas[ROWS], codes[ROWS], outside[ROWS];
    for (int row = 0; row < ROWS; row++) {
        Words first = load<Words>(values + row * 2 * ROW), second = load<Words>(values + row * 2 * ROW + ROW);
        first = first << 1 | first >> 15;
        second = second << 1 | second >> 15;
        exponents[row] = Bytes(first >> 8 | (second & 0xff00));
        mantissas[row] = Bytes((first & 0xff) | second << 8);
    }
    int escapes = climb(exponents, window);
    if (escapes > MANY) {
        uint8_t other = exponents[0][0] - OUTSIDE / 2;
        const int others = climb(exponents, other);
        if (others < escapes) window = other, escapes = others;
    }
    if (HEAD_BYTES + escapes >= PLAIN_BYTES || window == PLAIN) {
        *out = PLAIN;
        std::memcpy(out + 1, values, GROUP_BYTES);
        return PLAIN_BYTES;
    }
    *out = window;
    for (int row = 0; row < ROWS; row++) {
        const Bytes places = exponents[row] - window;
        outside[row] = Bytes(places >= OUTSIDE);
        codes[row] = (places & ~outside[row]) | (outside[row] & OUTSIDE);
        store(out + 1 + CODES_BYTES + row * ROW, mantissas[row]);
    }
    store(out + 1, codes[0] | codes[1] << 3 | codes[2] << 6);
    store(out + 1 + ROW, codes[2] >> 2 | codes[3] << 1 | codes[4] << 4 | codes[5] << 7);
    store(out + 1 + 2 * ROW, codes[5] >> 1 | codes[6] << 2 | codes[7] << 5);
    uint8_t* rest = out + HEAD_BYTES;
    for (int row = 0; row < ROWS; row += 2) {
        const auto* plain = reinterpret_cast<const uint8_t*>(exponents + row);
        rest += each(bits_of(outside[row], outside[row + 1]), [&](int n, int i) { rest[n] = plain[i % PAIR]; });
    }
    return rest - out;
}

// Decodes a group to `values`. Returns the bytes read, or 0 if the `left` bytes of `in` begin with no group. SLACK
// more bytes must be readable.
int64_t decode_group(char* values, const uint8_t* in, int64_t left) {
    if (left < 1) return 0;
    if (*in == PLAIN) {
        if (left < PLAIN_BYTES) return 0;
        std::memcpy(values, in + 1, GROUP_BYTES);
        return PLAIN_BYTES;
    }
    if (left < HEAD_BYTES) return 0;
    const Bytes low = load<Bytes>(in + 1), middle = load<Bytes>(in + 1 + ROW), high = load<Bytes>(in + 1 + 2 * ROW);
    const Bytes codes[ROWS] = {low & 7,         low >> 3 & 7,    (low >> 6 | middle << 2) & 7,  middle >> 1 & 7,
                               middle >> 4 & 7, (middle >> 7 | high << 1) & 7, high >> 2 & 7, high >> 5};
    uint8_t exponents[ROWS / 2][PAIR + 1];  // with a place for the surplus calls of `each`
    uint64_t outside[ROWS / 2];
    int64_t escapes = 0;
    for (int row = 0; row < ROWS; row += 2) {
        outside[row / 2] = bits_of(Bytes(codes[row] == OUTSIDE), Bytes(codes[row + 1] == OUTSIDE));
        escapes += __builtin_popcountll(outside[row / 2]);
        store(exponents[row / 2], codes[row] + *in);
        store(exponents[row / 2] + ROW, codes[row + 1] + *in);
    }
    if (left < HEAD_BYTES + escapes) return 0;
    const uint8_t* rest = in + HEAD_BYTES;
    for (int pair = 0; pair < ROWS / 2; pair++)
        rest += each(outside[pair], [&](int n, int i) { exponents[pair][i] = rest[n]; });
    for (int row = 0; row < ROWS; row++) {
        const Words exponent = load<Words>(exponents[row / 2] + row % 2 * ROW);
        const Words mantissa = load<Words>(in + 1 + CODES_BYTES + row * ROW);
        const Words first = exponent << 8 | (mantissa & 0xff), second = (exponent & 0xff00) | mantissa >> 8;
        store(values + row * 2 * ROW, first >> 1 | first << 15);
        store(values + row * 2 * ROW + ROW, second >> 1 | second << 15);
    }
    return HEAD_BYTES + escapes;
}

// Calls part(start, nbytes) for each block's part of the bytes [first, last) of the concatenated blocks.
template <class Part>
void each_part(const int64_t* blocks, int64_t block_bytes, int64_t first, int64_t last, const Part& part) {
    while (first < last) {
        const int64_t start = first % block_bytes, nbytes = std::min(block_bytes - start, last - first);
        part(blocks[first / block_bytes] * block_bytes + start, nbytes);
        first += nbytes;
    }
}

}  // namespace

// Encodes the bytes [first, last) of a pool's concatenated `blocks`. Returns the bytes written: fewer than
// last - first, or that number if the bytes were copied. `out` has room for one more byte per 512, and SLACK more.
extern "C" int64_t tandem_encode(uint8_t* out, const char* pool, const int64_t* blocks, int64_t block_bytes,
                                 int64_t first, int64_t last) {
    uint8_t* end = out;
    uint8_t window = USUAL_WINDOW;
    each_part(blocks, block_bytes, first, last, [&](int64_t start, int64_t nbytes) {
        for (; nbytes >= GROUP_BYTES; start += GROUP_BYTES, nbytes -= GROUP_BYTES)
            end += encode_group(end, pool + start, window);
        std::memcpy(end, pool + start, nbytes);
        end += nbytes;
    });
    if (end - out < last - first) return end - out;
    end = out;
    each_part(blocks, block_bytes, first, last, [&](int64_t start, int64_t nbytes) {
        std::memcpy(end, pool + start, nbytes);
        end += nbytes;
    });
    return last - first;
}

// Decodes `size` bytes into the same range. Returns whether they were its code; if not, a part is overwritten.
extern "C" int32_t tandem_decode(char* pool, const int64_t* blocks, int64_t block_bytes, int64_t first, int64_t last,
                                 const uint8_t* in, int64_t size) {
    const bool coded = size != last - first;
    bool good = true;
    each_part(blocks, block_bytes, first, last, [&](int64_t start, int64_t nbytes) {
        for (; coded && good && nbytes >= GROUP_BYTES; start += GROUP_BYTES, nbytes -= GROUP_BYTES) {
            const int64_t read = decode_group(pool + start, in, size);
            good = read > 0;
            in += read;
            size -= read;
        }
        good = good && size >= nbytes;
        if (!good) return;
        std::memcpy(pool + start, in, nbytes);
        in += nbytes;
        size -= nbytes;
    });
    return good && size == 0;
}
