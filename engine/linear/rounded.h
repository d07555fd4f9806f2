// Products of int8 or int4 codes with rows rounded to int8, in a unit for each run of inputs. A run's sum is an
// integer, so it is exact and independent of order, batch and CPU. It is scaled in float32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../devices/cpu/attention/simd.h"
#include "codes.h"
#include "floats.h"
#include "product.h"
#include "row_tiles.h"

namespace {

// Writes a run's values to `to` in units of its largest magnitude / 127, and returns the unit: NaN if a value is not
// finite.
template <class Input> float round_run(const uint16_t* x, int64_t count, Input* to) {
    uint16_t bits = 0;
    for (int64_t k = 0; k < count; k++) bits = std::max<uint16_t>(bits, x[k] & 0x7fff);
    const float largest = bf16_to_float(bits), least = 0x1p-119f;  // 127 / least is finite
    if (!(largest >= least && largest < std::numeric_limits<float>::infinity())) {
        std::fill_n(to, count, Input(0));
        return largest < least ? 0 : std::numeric_limits<float>::quiet_NaN();
    }
    const float inverse = 127 / largest;
    for (int64_t k = 0; k < count; k++) to[k] = Input(int32_t(__builtin_rintf(bf16_to_float(x[k]) * inverse)));
    return largest / 127;
}

// Orders inputs like the codes in the bytes of an output's two words: of each four inputs the even ones, then the odd
// ones; of each eight first the inputs of the bytes' low halves, then of the high halves.
struct InBytes {
    using Input = int8_t;

    template <class Codes> static void order(Input* values, int64_t count) {
        for (int64_t k = 0; k < count; k += 8) {
            uint64_t eight;
            memcpy(&eight, values + k, sizeof eight);
            if (Codes::CODES == 4) eight = swapped(eight, 16, 0x00000000ffff0000);
            eight = swapped(eight, 8, 0x0000ff000000ff00);
            memcpy(values + k, &eight, sizeof eight);
        }
    }

  private:
    // Swaps the bits of the mask with the bits `by` places above them.
    static uint64_t swapped(uint64_t bits, int by, uint64_t mask) {
        const uint64_t differences = (bits ^ bits >> (by)) & mask;
        return bits ^ differences ^ differences << by;
    }
};

#if defined(__AVX512VNNI__)
// Multiplies and adds four pairs of bytes at once; codes are made unsigned.
struct Bytes : InBytes {
    static constexpr int VECTORS = PANEL / 16;
    template <class Codes> static constexpr int32_t ZERO = Codes::ZERO;

    template <class Codes, int ROWS> static void multiply(
        const uint16_t* words, const uint16_t* ahead, const Input* x, int64_t stride, int64_t count, IntVec (&sums)[ROWS][VECTORS]) {
        for (int64_t k = 0; k < count; k += 2 * Codes::CODES, words += WORDS, ahead += WORDS) {
            __m512i octets[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                __builtin_prefetch(ahead + v * LINE_VALUES);
                octets[v] = _mm512_loadu_si512(words + v * LINE_VALUES) ^ _mm512_set1_epi32(Codes::SIGNS);
            }
            each_of([&](auto half) {
                __m512i codes[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    codes[v] = Codes::CODES == 2 ? octets[v] : (octets[v] >> 4 * half()) & _mm512_set1_epi32(0x0f0f0f0f);
                for (int r = 0; r < ROWS; r++) {
                    const auto inputs = _mm512_set1_epi32(*(const int32_t*)(x + r * stride + k + 4 * half()));
                    for (int v = 0; v < VECTORS; v++)
                        sums[r][v] = (IntVec)_mm512_dpbusd_epi32((__m512i)sums[r][v], codes[v], inputs);
                }
            }, std::make_integer_sequence<int, Codes::CODES / 2>{});
        }
    }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
// Multiplies and adds two pairs of bytes at once, and two such sums. For 8-bit codes, the code's sign moves to the
// input, so that no sum exceeds 16 bits.
struct Bytes : InBytes {
    static constexpr int VECTORS = 2;
    template <class Codes> static constexpr int32_t ZERO = Codes::CODES == 2 ? 0 : Codes::ZERO;

    template <class Codes, int ROWS> static void multiply(
        const uint16_t* words, const uint16_t* ahead, const Input* x, int64_t stride, int64_t count, IntVec (&sums)[ROWS][VECTORS]) {
        const auto one = _mm256_set1_epi16(1), low_half = _mm256_set1_epi8(15);
        for (int64_t k = 0; k < count; k += 2 * Codes::CODES, words += WORDS, ahead += LINE_VALUES) {
            __builtin_prefetch(ahead);
            __m256i codes[VECTORS], others[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const auto octets = _mm256_loadu_si256((const __m256i*)(words + v * LINE_VALUES / 2));
                codes[v] = Codes::CODES == 2 ? octets : _mm256_and_si256(octets, low_half);
                others[v] = Codes::CODES == 2 ? _mm256_abs_epi8(octets) : _mm256_and_si256(_mm256_srli_epi16(octets, 4), low_half);
            }
            for (int r = 0; r < ROWS; r++) {
                const auto inputs = four_inputs(x + r * stride + k);
                for (int v = 0; v < VECTORS; v++) {
                    __m256i products;
                    if constexpr (Codes::CODES == 2)
                        products = _mm256_maddubs_epi16(others[v], _mm256_sign_epi8(inputs, codes[v]));
                    else
                        products = _mm256_add_epi16(_mm256_maddubs_epi16(codes[v], inputs),
                                                    _mm256_maddubs_epi16(others[v], four_inputs(x + r * stride + k + 4)));
                    sums[r][v] += (IntVec)_mm256_madd_epi16(products, one);
                }
            }
        }
    }

  private:
    static __m256i four_inputs(const Input* x) {
        int32_t four;
        memcpy(&four, x, sizeof four);
        return _mm256_set1_epi32(four);
    }
};
#endif

// Multiplies and adds two pairs of 16-bit numbers at once, on any CPU.
struct Shorts {
    using Input = int16_t;
    static constexpr int VECTORS = LANES == 16 ? 4 : 2;
    template <class Codes> static constexpr int32_t ZERO = Codes::ZERO;

    template <class Codes> static void order(Input*, int64_t) {}

    template <class Codes, int ROWS> static void multiply(
        const uint16_t* words, const uint16_t*, const Input* x, int64_t stride, int64_t count, IntVec (&sums)[ROWS][VECTORS]) {
        constexpr int BITS = 16 / Codes::CODES, MASK = ((1 << BITS) - 1) * 0x10001;
        for (int64_t k = 0; k < count; k += 2 * Codes::CODES, words += WORDS)
            for (int i = 0; i < Codes::CODES; i++) {
                IntVec codes[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    codes[v] = ((load((const int32_t*)(words + 2 * v * LANES)) ^ Codes::SIGNS) >> BITS * i) & MASK;
                for (int r = 0; r < ROWS; r++) {
                    int32_t two;
                    memcpy(&two, x + r * stride + k + 2 * i, sizeof two);
                    for (int v = 0; v < VECTORS; v++) sums[r][v] += products(codes[v], two - IntVec{});
                }
            }
    }

  private:
    // Returns the sum of each lane's two products.
    static IntVec products(IntVec a, IntVec b) {
#if defined(__AVX512BW__)
        return (IntVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (IntVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
        return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
    }
};

template <class Dot, class Codes> class Rounded {
  public:
    using Input = typename Dot::Input;
    static constexpr bool ROUNDS = true;
    static constexpr int64_t LONGEST_RUN = 1 << 16;  // the sum of this number of products fits into 32 bits
    struct Registers {
        explicit Registers(const Product&) {}
    };

    // Returns the inputs of rows [row, end), valid until the next call.
    const Input* inputs(const Product& p, int64_t row, int64_t end) {
        const int64_t K = p.in_features, runs = (K + p.run - 1) / p.run;
        values.resize((end - row) * K), units.resize((end - row) * runs), sums.resize((end - row) * runs);
        for (int64_t r = 0; r < end - row; r++) {
            Input* to = values.data() + r * K;
            for (int64_t i = 0, k = 0; i < runs; i++, k += p.run) {
                const int64_t count = std::min(p.run, K - k);
                units[r * runs + i] = round_run(p.x + (row + r) * K + k, count, to + k);
                int32_t sum = 0;
                for (int64_t j = k; j < k + count; j++) sum += to[j];
                sums[r * runs + i] = sum;
            }
            Dot::template order<Codes>(to, K);
        }
        return values.data();
    }

    // Computes rows [first, end) of one panel; `x` are the rows returned by `inputs`.
    void rows_of_codes(const Product& p, const Coded& w, const Input* x, int64_t first, int64_t end, int64_t panel) const {
        in_tiles<6>(first, end, [&](auto rows, int64_t row) {
            const int64_t r = row - first;
            tile<rows()>(p, w, x + r * p.in_features, units.data() + r * w.runs, sums.data() + r * w.runs, row, panel);
        });
    }

  private:
    static constexpr int WIDTH = Dot::VECTORS * LANES;
    static constexpr int64_t AHEAD_OF_ROWS = 1 << 11;  // prefetch distance of codes, in words: 4 KiB

    template <int ROWS> static void tile(
        const Product& p, const Coded& w, const Input* x, const float* input_units, const int32_t* input_sums, int64_t row,
        int64_t panel) {
        float totals[ROWS][PANEL] = {};
        for (int64_t i = 0, k = 0; k < p.in_features; i++, k += w.run) {
            const int64_t count = std::min(w.run, p.in_features - k);
            const uint16_t* words = w.words + k * (PANEL / Codes::CODES);
            for (int part = 0; part < PANEL; part += WIDTH) {
                IntVec products[ROWS][Dot::VECTORS];
                for (int r = 0; r < ROWS; r++)  // corrects for the zero point of unsigned codes
                    for (auto& sum : products[r]) sum = -Dot::template ZERO<Codes> * input_sums[r * w.runs + i] - IntVec{};
                const uint16_t* ahead = words + AHEAD_OF_ROWS + part * (count / Codes::CODES);  // in memory order
                Dot::template multiply<Codes>(words + 2 * part, ahead, x + k, p.in_features, count, products);
                for (int v = 0; v < Dot::VECTORS; v++) {
                    const int n = part + v * LANES;
                    const int64_t scale = k / w.group * PANEL + n;
                    const Vec factors = w.scales.factors(scale);
                    const Vec offsets = w.scales.have_offsets() ? w.scales.offsets(scale) : Vec{};
                    for (int r = 0; r < ROWS; r++) {
                        const float unit = input_units[r * w.runs + i];
                        Vec total = fused(__builtin_convertvector(products[r][v], Vec) * unit, factors, load(totals[r] + n));
                        if (w.scales.have_offsets()) total = fused(offsets, splat(float(input_sums[r * w.runs + i]) * unit), total);
                        store(totals[r] + n, total);
                    }
                }
            }
        }
        Floats::put_totals(p, totals[0], row, row + ROWS, panel);
    }

    std::vector<Input> values;
    std::vector<float> units;   // [rows][runs]
    std::vector<int32_t> sums;  // [rows][runs]
};

}  // namespace
