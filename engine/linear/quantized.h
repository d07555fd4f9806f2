// A product with quantized weights. Tiles expand them in registers for few rows if they can, or some inputs' weights of
// a panel at a time into the L1 cache; for many rows most expand a whole panel into the L2 cache. A run of inputs, which
// share their scales, is summed in float32; then the sums are scaled and added up in ascending order of inputs. So a
// row's result has the same bits in every batch.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../native/cache_lines.h"
#include "codes.h"
#include "floats.h"
#include "product.h"
#include "rounded.h"
#include "shares.h"

namespace {

// packed.py mirrors it, with `Args` after its name.
struct Quantized {
    const uint16_t* words;     // see codes.h
    const char* scales;        // [n / 64][group][64], see scales.h
    const char* minima;        // [n / 64][group][64], or null
    const int32_t* inputs;     // [in_features]: the input that each code multiplies; null: in the inputs' order
    const uint16_t* bias;      // null for none
    int64_t in_features, out_features;
    int64_t group;             // number of inputs that share a scale; a multiple of 32
    int64_t scale_bytes;       // size of a scale or minimum: 2 or 4
    int64_t format;
    int64_t input_group;       // a row's inputs with one int8 unit (rounded.h), for INT8 and INT4; 0: not rounded
};

// Returns the scales of the first panel.
template <class Codes> Scales scales_of(const Quantized& q, float unit = Codes::UNIT) {
    return {q.scales, q.minima, q.scale_bytes, unit, Codes::CENTER, Codes::OFFSET};
}

// Writes one output's INT8 weights, rounded to bfloat16.
inline void write_row(const Quantized& q, int64_t output, uint16_t* out) {
    const int64_t panel = output / PANEL, lane = output % PANEL;
    const uint16_t* words = q.words + panel * q.in_features * (PANEL / Int8::CODES) + 2 * lane;
    const Scales scales = scales_of<Int8>(q).from(panel * (q.in_features / q.group) * PANEL + lane);
    for (int64_t k = 0; k < q.in_features; k += 4, words += WORDS) {
        const float scale = scales.scale(k / q.group * PANEL);
        for (int64_t i = 0; i < 4; i++) out[k + i] = float_to_bf16(float(int8_t(words[i % 2] >> 8 * (i / 2))) * scale);
    }
}

constexpr int64_t SLICE = 128;  // number of inputs whose weights are expanded at a time: 16 KiB

struct alignas(64) Line {
    uint16_t values[LINE_VALUES];
};

// Inputs in the order of the codes, and, if there are minima, each row's sums over the inputs that share a scale.
struct Inputs {
    AlignedVector<uint16_t> ordered;
    std::vector<float> sums;

    const uint16_t* order(const uint16_t* x, const Quantized& q, int64_t rows) {
        if (!q.inputs) return x;
        const int64_t K = q.in_features;
        ordered.resize(rows * K);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = 0; k < K; k++) ordered[r * K + k] = x[r * K + q.inputs[k]];
        return ordered.data();
    }

    // Writes `sums` [rows][runs], each over ascending inputs in LANES lanes.
    void add_up(const uint16_t* x, const Quantized& q, int64_t rows, int64_t run, int64_t runs, int64_t threads,
                Parallel parallel) {
        sums.resize(rows * runs);
        const int64_t parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        share_out(parts, std::min(parts, threads), parallel, [&](int64_t part) {
            for (int64_t r = part * ROWS_AT_ONCE; r < std::min((part + 1) * ROWS_AT_ONCE, rows); r++)
                for (int64_t i = 0; i < runs; i++) {
                    const uint16_t* from = x + r * q.in_features + i * run;
                    Vec lanes{};
                    for (int64_t k = 0; k < std::min(run, q.in_features - i * run); k += LANES) lanes += widen(from + k);
                    sums[r * runs + i] = sum_of_lanes(lanes);
                }
        });
    }

  private:
    static constexpr int64_t ROWS_AT_ONCE = 16;
};

// Expands the weights for inputs [k, k + count).
template <class Codes> void expand(const Coded& w, int64_t k, int64_t count, uint16_t* to) {
    const uint16_t* words = w.words + k * (PANEL / Codes::CODES);
    for (int64_t i = 0; i < count; i += 2 * Codes::CODES, words += WORDS, to += Codes::CODES * WORDS) {
        for (int64_t line = 0; line < WORDS; line += LINE_VALUES) __builtin_prefetch(words + AHEAD + line, 0, 2);
        expand<Codes>(words, to);
    }
}

// Returns the thread's buffer for a panel's expanded weights of `count` inputs.
inline uint16_t* room(int64_t count) {
    static thread_local std::vector<Line> lines;
    lines.resize(count * PANEL / LINE_VALUES);
    return lines.data()->values;
}

// Computes rows [first, end) of one panel, at most BLOCK_ROWS, run by run. For more rows than the registers have sums,
// a run's weights are expanded in memory. `inputs` begin at row `first`.
template <class Codes>
void rows_of_expanded(Floats& tiles, const Product& p, const Coded& w, const Floats::Input* inputs, int64_t first,
                      int64_t end, int64_t panel) {
    static thread_local float totals[BLOCK_ROWS * PANEL];
    const int64_t K = p.in_features;
    uint16_t* expanded = room(SLICE);
    std::fill_n(totals, (end - first) * PANEL, 0.0f);
    for (int64_t i = 0, k = 0; k < K; i++, k += w.run) {
        const int64_t count = std::min(w.run, K - k);
        const Run run{k, count, w.scales.from(k / w.group * PANEL), w.input_sums + first * w.runs + i, w.runs, totals};
        if (end - first <= Floats::MOST_ROWS) {
            tiles.rows_of_coded_run<Codes>(p, w.words + k * (PANEL / Codes::CODES), inputs, first, end, run);
        } else {
            expand<Codes>(w, k, count, expanded);
            tiles.rows_of_run(p, expanded, inputs, first, end, run);
        }
    }
    tiles.put_totals(p, totals, first, end, panel);
}

// Computes the same rows with tiles that can expand weights in registers, which they do for few rows.
template <class Codes, class Tiles>
void rows_of_codes(Tiles& tiles, const Product& p, Coded w, const typename Tiles::Input* inputs,
                   int64_t first, int64_t end, int64_t panel) {
    if (end - first <= Tiles::FEW_ROWS) return tiles.template rows_of_codes<Codes>(p, w, inputs, first, end, panel);
    uint16_t* expanded = room(p.in_features);
    expand<Codes>(w, 0, p.in_features, expanded);
    w.words = expanded;
    tiles.template rows_of_codes<Plain>(p, w, inputs, first, end, panel);
}

template <class Tiles, class Codes>
void multiply(const uint16_t* x, const Quantized& q, uint16_t* out, int64_t rows, int64_t most_threads, Parallel parallel) {
    const int64_t K = q.in_features, longest = Tiles::ROUNDS ? q.input_group : q.group;
    const int64_t run = std::min({q.group, longest, Tiles::LONGEST_RUN});
    const int64_t groups = K / q.group, runs = (K + run - 1) / run;
    thread_local Inputs prepared;
    x = prepared.order(x, q, rows);
    const Scales scales = scales_of<Codes>(q, Tiles::ROUNDS ? 1 : Codes::UNIT);
    if (scales.have_offsets() && !Tiles::ROUNDS) prepared.add_up(x, q, rows, run, runs, most_threads, parallel);
    const float* input_sums = prepared.sums.data();
    const Product p{x, nullptr, q.bias, out, rows, K, q.out_features, run};
    each_panel<Tiles>(p, most_threads, parallel, [&](auto& tiles, const auto* inputs, int64_t first, int64_t end, int64_t panel) {
        const Coded w{q.words + panel * K * (PANEL / Codes::CODES), scales.from(panel * groups * PANEL), input_sums,
                      q.group, run, runs};
        if constexpr (Tiles::ROUNDS) tiles.rows_of_codes(p, w, inputs, first, end, panel);
        else if constexpr (Tiles::EXPANDS) rows_of_codes<Codes>(tiles, p, w, inputs, first, end, panel);
        else if constexpr (Tiles::TAKES_RUNS) tiles.template rows_of_runs<Codes>(p, w, inputs, first, end, panel);
        else rows_of_expanded<Codes>(tiles, p, w, inputs, first, end, panel);
    });
}

template <class Tiles>
void multiply(const uint16_t* x, const Quantized& q, uint16_t* out, int64_t rows, int64_t most_threads, Parallel parallel) {
    switch (q.format) {
        case INT8: return multiply<Tiles, Int8>(x, q, out, rows, most_threads, parallel);
        case INT4: return multiply<Tiles, typename Tiles::Int4Codes>(x, q, out, rows, most_threads, parallel);
        case FP8: return multiply<Tiles, Fp8>(x, q, out, rows, most_threads, parallel);
        case MXFP4: return multiply<Tiles, Mxfp4>(x, q, out, rows, most_threads, parallel);
    }
}

template <class Dot>
void multiply_rounded(const uint16_t* x, const Quantized& q, uint16_t* out, int64_t rows, int64_t most_threads, Parallel parallel) {
    if (q.format == INT8) return multiply<Rounded<Dot, Int8>, Int8>(x, q, out, rows, most_threads, parallel);
    multiply<Rounded<Dot, Int4>, Int4>(x, q, out, rows, most_threads, parallel);
}

}  // namespace
