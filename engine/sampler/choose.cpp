// Sampling of a token for each row of logits in one call, for sampler.py, and the draws of drafters.

#include "chooser.h"

namespace {

struct Logits {
    const void* logits;
    int64_t stride, size, count;
    const Sampling* requests;
    const int64_t *numbers, *positions;  // each row's request, and its token's position
    int64_t* chosen;                     // -1 where no token has a finite score
    const uint32_t* const* masks;        // for each row the bits of the tokens that may be chosen, null for all
    Edits edits;
};

// Rows whose distributions are computed. Draft tokens are drawn from these, in rounds that began at `starts`.
struct Drafted {
    Logits rows;
    const int64_t* starts;  // null: no tokens are drawn
    float* distributions;   // [count, size]; a failed row gets zeros or, if tokens are drawn, token 0 for certain
};

RowEdits edits_of(const Logits& rows, int64_t row) {
    return edits_of(rows.edits, row, rows.masks ? rows.masks[row] : nullptr);
}

template <class T> const T* row_of(const Logits& rows, int64_t row) {
    return static_cast<const T*>(rows.logits) + row * rows.stride;
}

template <class T> int64_t choose(const Logits& rows, int64_t threads, Parallel parallel) {
    with_choosers(rows.count, rows.count * rows.size, threads, parallel, [&](int64_t row, Chooser& chooser) {
        const Sampling& request = rows.requests[rows.numbers[row]];
        const RowEdits edits = edits_of(rows, row);
        rows.chosen[row] = chooser.choose(row_of<T>(rows, row), rows.size, request, rows.positions[row], edits);
    });
    return std::count(rows.chosen, rows.chosen + rows.count, -1);
}

template <class T> int64_t draw_drafts(const Drafted& drafted, int64_t threads, Parallel parallel) {
    const Logits& rows = drafted.rows;
    with_choosers(rows.count, rows.count * rows.size, threads, parallel, [&](int64_t row, Chooser& chooser) {
        const Sampling& request = rows.requests[rows.numbers[row]];
        float* distribution = drafted.distributions + row * rows.size;
        if (!chooser.distribution(row_of<T>(rows, row), rows.size, request, distribution, edits_of(rows, row))) {
            std::fill_n(distribution, rows.size, 0.0f);
            distribution[0] = drafted.starts ? 1 : 0;
        }
        if (!drafted.starts) return;
        const uint64_t key = round_key(request.seed, drafted.starts[row], rows.positions[row], DRAFT);
        rows.chosen[row] = draw(distribution, rows.size, key);
    });
    return 0;
}

}  // namespace

// tandem_choose_* return how many rows failed, tandem_draw_* return 0.
extern "C" {

int64_t tandem_choose_bf16(const Logits* rows, int64_t threads, Parallel parallel) {
    return choose<bf16>(*rows, threads, parallel);
}

int64_t tandem_choose_float(const Logits* rows, int64_t threads, Parallel parallel) {
    return choose<float>(*rows, threads, parallel);
}

int64_t tandem_draw_bf16(const Drafted* drafted, int64_t threads, Parallel parallel) {
    return draw_drafts<bf16>(*drafted, threads, parallel);
}

int64_t tandem_draw_float(const Drafted* drafted, int64_t threads, Parallel parallel) {
    return draw_drafts<float>(*drafted, threads, parallel);
}
}
