// Products of attention by AMX-BF16 tiles: one instruction multiplies up to 16 query rows by 16 words of 16 columns.
#pragma once

#include "product.h"

#if defined(BF16_PAIRS) && defined(__AMX_BF16__)
#define MATRIX_TILES 1

#include "../../../../native/tile_registers.h"

// Pairs of bfloat16 in tiles.
struct TileMath : PairMath {
    static constexpr bool TILES = true;
    static constexpr int ROWS = TileRegisters::ROWS, DEPTH = 16;
    using Registers = TileRegisters;
};

// Computes COLUMNS vectors of columns. Their sums are begun with `sums` if ADD, else with zero.
template <bool ADD, int COLUMNS>
static void product_in_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int depth,
                             float* sums, int64_t sums_stride) {
    const int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, bytes = sums_stride * 4;
    tiles_will_load();
    if constexpr (ADD) load_sums<COLUMNS>(sums, LANES, bytes);
    else clear_sums<COLUMNS>();
    for (int d = 0; d < depth; d += TileMath::DEPTH, b += TileMath::DEPTH * b_stride)
        multiply_tiles<COLUMNS>(a + d, a_bytes, b, b_bytes);
    store_sums<COLUMNS>(sums, LANES, bytes);
}

// Computes products[key][16 rows] of 16 keys at a time, read as stored, with rows packed as [word][16]. The keys are
// `key_bytes` apart. The terms of a sum are added in the same order as in `product_of`.
static inline void multiply_keys(TileRegisters& registers, int rows, const uint16_t* const* keys, int64_t offset,
                                 int64_t key_bytes, int num_keys, const uint32_t* queries, int words, float* products) {
    registers.shape(rows);
    tiles_will_load();
    for (int key = 0; key < num_keys; key += 16) {
        clear_sixteen();
        for (int w = 0; w < words; w += TileMath::DEPTH)
            multiply_sixteen(keys[key] + offset + 2 * w, key_bytes, queries + w * 16, 64);
        store_sixteen(products + key * 16, 64);
    }
}

// As for the other kinds of `Math`. Sums of earlier tiles are rescaled before.
template <class Math, bool ADD>
static void product_of(TileRegisters& registers, int rows, const uint32_t* a, int64_t a_stride,
                       const Packed<uint32_t>& b, int depth, const float* scale, float* sums, int64_t sums_stride,
                       int vectors) {
    registers.shape(rows);
    if (ADD) rescale_rows(sums, sums_stride, rows, vectors * LANES, scale);
    const auto columns = [&](auto count, int c) {
        product_in_tiles<ADD, count>(a, a_stride, b.words + c * LANES, b.stride, depth, sums + c * LANES, sums_stride);
    };
    int c = 0;
    for (; c + 4 <= vectors; c += 4) columns(std::integral_constant<int, 4>(), c);
    switch (vectors - c) {
        case 1: return columns(std::integral_constant<int, 1>(), c);
        case 2: return columns(std::integral_constant<int, 2>(), c);
        case 3: return columns(std::integral_constant<int, 3>(), c);
    }
}
#endif
