// Stands in for the compiler's <immintrin.h> on any CPU: what the kernels use of AVX-512 and AMX, in plain C++.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64)));
typedef int32_t __m512i __attribute__((vector_size(64)));
typedef uint16_t __m512bh __attribute__((vector_size(64)));
typedef uint16_t __m256i __attribute__((vector_size(32)));
typedef uint16_t __m256bh __attribute__((vector_size(32)));
typedef int8_t __m128i __attribute__((vector_size(16)));
typedef uint16_t __mmask16;
typedef uint32_t __mmask32;

inline float emulated_widen(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline uint16_t emulated_narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Vector> Vector emulated_load(const void* from) {
    Vector loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) { return a * b + c; }
inline __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) { return c - a * b; }
inline __m512 _mm512_set1_ps(float value) { return __m512{} + value; }
inline void _mm512_storeu_si512(void* to, __m512i value) { memcpy(to, &value, sizeof value); }
inline void _mm512_storeu_ps(void* to, __m512 value) { memcpy(to, &value, sizeof value); }
inline __m512 _mm512_loadu_ps(const void* from) { return emulated_load<__m512>(from); }
inline __m512i _mm512_loadu_si512(const void* from) { return emulated_load<__m512i>(from); }
inline __m512 _mm512_castsi512_ps(__m512i value) { return (__m512)value; }
inline __m512i _mm512_set1_epi32(int32_t value) { return __m512i{} + value; }
inline __m512i _mm512_slli_epi32(__m512i value, int by) { return value << by; }
inline __m512i _mm512_cvtepu16_epi32(__m256i value) { return __builtin_convertvector(value, __m512i); }

inline __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void* from) {
    __m256i loaded{};
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) loaded[i] = static_cast<const uint16_t*>(from)[i];
    return loaded;
}

inline void _mm256_mask_storeu_epi16(void* to, __mmask16 mask, __m256i value) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) static_cast<uint16_t*>(to)[i] = value[i];
}

inline __m256bh _mm512_cvtneps_pbh(__m512 value) {
    __m256bh narrow;
    for (int i = 0; i < 16; i++) narrow[i] = emulated_narrow(value[i]);
    return narrow;
}

// The first operand's values come last.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    __m512bh narrow;
    for (int i = 0; i < 16; i++) narrow[i] = emulated_narrow(low[i]), narrow[16 + i] = emulated_narrow(high[i]);
    return narrow;
}

inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int i = 0; i < 16; i++) {
        sums[i] += emulated_widen(a[2 * i + 1]) * emulated_widen(b[2 * i + 1]);
        sums[i] += emulated_widen(a[2 * i]) * emulated_widen(b[2 * i]);
    }
    return sums;
}

inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    uint8_t codes[64];
    int8_t values[64];
    memcpy(codes, &a, 64), memcpy(values, &b, 64);
    for (int i = 0; i < 64; i++) sums[i / 4] += codes[i] * values[i];
    return sums;
}

// Attention's: copies, shuffles and 16-bit numbers.

inline __m128i _mm_loadu_si128(const void* from) { return emulated_load<__m128i>(from); }
inline __m256i _mm256_loadu_si256(const void* from) { return emulated_load<__m256i>(from); }
inline void _mm256_storeu_si256(void* to, __m256i value) { memcpy(to, &value, sizeof value); }
inline __m512i _mm512_load_si512(const void* from) { return emulated_load<__m512i>(from); }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }

inline float _mm512_reduce_max_ps(__m512 value) {
    float most = value[0];
    for (int i = 1; i < 16; i++) most = value[i] > most ? value[i] : most;
    return most;
}

// Adds halves of the vector until one number is left.
inline float _mm512_reduce_add_ps(__m512 value) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) value[i] += value[i + half];
    return value[0];
}

inline __m512i _mm512_castsi128_si512(__m128i value) {
    __m512i wide{};
    memcpy(&wide, &value, sizeof value);
    return wide;
}

inline __m512i _mm512_inserti32x4(__m512i wide, __m128i value, int lane) {
    memcpy((char*)&wide + 16 * lane, &value, sizeof value);
    return wide;
}

inline __m256i _mm512_extracti64x4_epi64(__m512i value, int half) {
    return emulated_load<__m256i>((const char*)&value + 32 * half);
}

inline __m256i _mm512_castsi512_si256(__m512i value) { return _mm512_extracti64x4_epi64(value, 0); }

// Takes numbers of both vectors in turn from one half of each 128-bit lane.
template <class Number>
inline __m512i emulated_unpack(__m512i a, __m512i b, int half) {
    constexpr int COUNT = 16 / sizeof(Number);
    Number from[2][4 * COUNT], to[4 * COUNT];
    memcpy(from[0], &a, 64), memcpy(from[1], &b, 64);
    for (int i = 0; i < 4 * COUNT; i++) to[i] = from[i % 2][i / COUNT * COUNT + half * COUNT / 2 + i % COUNT / 2];
    return emulated_load<__m512i>(to);
}

inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return emulated_unpack<int32_t>(a, b, 0); }
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return emulated_unpack<int32_t>(a, b, 1); }
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return emulated_unpack<int64_t>(a, b, 0); }
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return emulated_unpack<int64_t>(a, b, 1); }

typedef uint16_t EmulatedShorts __attribute__((vector_size(64)));

inline __m512i _mm512_set1_epi16(int16_t value) { return (__m512i)(EmulatedShorts{} + uint16_t(value)); }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) { return (__m512i)((EmulatedShorts)a + (EmulatedShorts)b); }
inline __m512i _mm512_slli_epi16(__m512i value, int by) { return (__m512i)((EmulatedShorts)value << by); }

// Widens COUNT numbers.
template <class From, class To, int COUNT, class Narrow>
inline __m512i emulated_widen_all(Narrow value) {
    From from[COUNT];
    To to[COUNT];
    memcpy(from, &value, sizeof from);
    for (int i = 0; i < COUNT; i++) to[i] = from[i];
    return emulated_load<__m512i>(to);
}

inline __m512i _mm512_cvtepi8_epi32(__m128i value) { return emulated_widen_all<int8_t, int32_t, 16>(value); }
inline __m512i _mm512_cvtepi8_epi16(__m256i value) { return emulated_widen_all<int8_t, int16_t, 32>(value); }
inline __m512i _mm512_cvtepu8_epi16(__m256i value) { return emulated_widen_all<uint8_t, uint16_t, 32>(value); }

inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
}

inline __mmask32 _mm512_cmplt_epu16_mask(__m512i a, __m512i b) {
    __mmask32 mask = 0;
    for (int i = 0; i < 32; i++) mask |= __mmask32(((EmulatedShorts)a)[i] < ((EmulatedShorts)b)[i]) << i;
    return mask;
}

inline __m512i _mm512_mask_permutexvar_epi16(__m512i otherwise, __mmask32 mask, __m512i index, __m512i from) {
    auto taken = (EmulatedShorts)otherwise;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) taken[i] = ((EmulatedShorts)from)[((EmulatedShorts)index)[i] % 32];
    return (__m512i)taken;
}

inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    EmulatedShorts taken;
    for (int i = 0; i < 32; i++) {
        const int place = ((EmulatedShorts)index)[i] % 64;
        taken[i] = ((EmulatedShorts)(place < 32 ? a : b))[place % 32];
    }
    return (__m512i)taken;
}

inline __m256i _mm256_maskz_loadu_epi8(__mmask32 mask, const void* from) {
    uint8_t loaded[32] = {};
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) loaded[i] = static_cast<const uint8_t*>(from)[i];
    return emulated_load<__m256i>(loaded);
}

inline void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, __m512i value) {
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) static_cast<uint16_t*>(to)[i] = ((EmulatedShorts)value)[i];
}

inline void _mm512_mask_storeu_epi32(void* to, __mmask16 mask, __m512i value) {
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) static_cast<int32_t*>(to)[i] = value[i];
}

// What becomes of denormal numbers stays as it is, the same in all instructions.
inline unsigned _mm_getcsr() { return 0; }
inline void _mm_setcsr(unsigned) {}

// A thread's eight tile registers: as the configuration shapes them, at most 16 rows of 64 bytes.
struct EmulatedTiles {
    bool configured = false;
    int rows[8], row_bytes[8];
    uint8_t data[8][16][64];
};

inline EmulatedTiles& emulated_tiles() {
    static thread_local EmulatedTiles tiles;
    return tiles;
}

// A CPU faults where a tile is used without a shape, or with one that does not fit.
inline void emulated_check(bool fits) {
    if (!fits) abort();
}

inline void _tile_loadconfig(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    EmulatedTiles& tiles = emulated_tiles();
    emulated_check(bytes[0] == 1 && bytes[1] == 0);
    for (int tile = 0; tile < 8; tile++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, bytes + 16 + 2 * tile, 2);
        tiles.row_bytes[tile] = row_bytes, tiles.rows[tile] = bytes[48 + tile];
        emulated_check(row_bytes <= 64 && row_bytes % 4 == 0 && tiles.rows[tile] <= 16);
    }
    memset(tiles.data, 0, sizeof tiles.data);
    tiles.configured = true;
}

inline void _tile_release() { emulated_tiles().configured = false; }

inline void _tile_zero(int tile) {
    emulated_check(emulated_tiles().configured);
    memset(emulated_tiles().data[tile], 0, sizeof emulated_tiles().data[tile]);
}

inline void _tile_loadd(int tile, const void* from, int64_t stride) {
    EmulatedTiles& tiles = emulated_tiles();
    emulated_check(tiles.configured);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.data[tile][row], static_cast<const uint8_t*>(from) + row * stride, tiles.row_bytes[tile]);
}

inline void _tile_stored(int tile, void* to, int64_t stride) {
    const EmulatedTiles& tiles = emulated_tiles();
    emulated_check(tiles.configured);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(static_cast<uint8_t*>(to) + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
}

// Row m of a holds pairs of inputs, row k of b the same pairs of each output's weights. The products of even inputs and
// those of odd ones are added up apart from each other.
inline void _tile_dpbf16ps(int sums, int a, int b) {
    EmulatedTiles& tiles = emulated_tiles();
    emulated_check(tiles.configured && tiles.rows[sums] == tiles.rows[a]);
    emulated_check(tiles.row_bytes[a] == 4 * tiles.rows[b] && tiles.row_bytes[sums] == tiles.row_bytes[b]);
    for (int m = 0; m < tiles.rows[a]; m++) {
        const auto inputs = emulated_load<__m512bh>(tiles.data[a][m]);
        __m512 parts[2] = {};
        for (int k = 0; k < tiles.rows[b]; k++) {
            const auto weights = emulated_load<__m512bh>(tiles.data[b][k]);
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 16; i++)
                    parts[half][i] += emulated_widen(inputs[2 * k + half]) * emulated_widen(weights[2 * i + half]);
        }
        const __m512 row = emulated_load<__m512>(tiles.data[sums][m]) + (parts[0] + parts[1]);
        memcpy(tiles.data[sums][m], &row, sizeof row);
    }
}
