// The product of one row with quantized weights in vector registers, which takes two thirds of the tiles' time but has
// their bits. For each 32 inputs, AMX's TDPBF16PS adds up the products of the even ones and of the odd ones, each in
// ascending order, then adds both to the sum. It takes denormal numbers as zero, so this needs DenormalsAreZero.

#pragma once

#include <cstdint>
#include <immintrin.h>
#include <vector>

#include "../devices/cpu/attention/simd.h"
#include "codes.h"
#include "outputs.h"
#include "product.h"

namespace {

// Makes the thread's vector instructions take denormal numbers as zero while it lives.
class DenormalsAreZero {
  public:
    DenormalsAreZero() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    DenormalsAreZero(const DenormalsAreZero&) = delete;
    ~DenormalsAreZero() { _mm_setcsr(before); }

  private:
    const unsigned before;
};

class OneRow {
  public:
    // Keeps a row's inputs as float32.
    void take(const Product& p, int64_t row) {
        inputs.resize(p.in_features);
        for (int64_t k = 0; k < p.in_features; k++) inputs[k] = bf16_to_float(p.x[row * p.in_features + k]);
    }

    // Computes a panel of the row that was taken.
    template <class Codes> void panel_of_codes(const Product& p, const Coded& w, int64_t row, int64_t panel) const {
        Sums totals = {};
        for (int64_t i = 0, k = 0; i < w.runs; i++, k += w.run) {
            Sums sums = {};
            for (int64_t step = k; step < k + w.run; step += DEPTH)
                add_step<Codes>(w.words + step * (PANEL / Codes::CODES), inputs.data() + step, sums);
            for (int v = 0; v < VECTORS; v++) {
                const int64_t scale = k / w.group * PANEL + v * LANES;
                totals[v] = fused(sums[v], w.scales.factors(scale), totals[v]);
                if (w.scales.have_offsets())
                    totals[v] = fused(splat(w.input_sums[row * w.runs + i]), w.scales.offsets(scale), totals[v]);
            }
        }
        for (int v = 0; v < VECTORS; v += 2)
            Outputs(p, panel * PANEL + v * LANES).put(row, (__m512)totals[v], (__m512)totals[v + 1]);
    }

  private:
    static constexpr int DEPTH = 32;           // inputs of a tile's multiplication
    static constexpr int64_t AHEAD = 1 << 11;  // prefetch distance of codes, in words: 4 KiB
    static constexpr int VECTORS = PANEL / LANES;
    using Sums = Vec[VECTORS];

    template <class Codes> static void add_step(const uint16_t* words, const float* x, Sums& sums) {
        Sums parts[2] = {};  // of even and of odd inputs
        for (int k = 0; k < DEPTH; k += 2 * Codes::CODES, words += WORDS) {
            IntVec pairs[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                __builtin_prefetch(words + AHEAD + v * LINE_VALUES);
                pairs[v] = load((const int32_t*)words + v * LANES);
            }
            each_of([&](auto i) {
                for (int v = 0; v < VECTORS; v++) {
                    Vec& part = parts[i() % 2][v];
                    part = fused(Codes::template floats<i()>(pairs[v]), splat(x[k + i()]), part);
                }
            }, std::make_integer_sequence<int, 2 * Codes::CODES>{});
        }
        for (int v = 0; v < VECTORS; v++) sums[v] += parts[0][v] + parts[1][v];
    }

    std::vector<float> inputs;
};

}  // namespace
