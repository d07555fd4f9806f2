// The state that the parts of a step share: its rows, its threads, and a layer's products.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "row_math.h"
#include "structs.h"

namespace {

constexpr int64_t SERIAL_ROWS = 16;  // fewest rows that are worth several threads between two products
constexpr int64_t ROWS_AT_ONCE = 8;

class Work {
  public:
    explicit Work(const Model& model)
        : m(model), layers(model.layers, model.layers + model.num_layers + model.num_beside) {}

    const Model m;
    const std::vector<Layer> layers;
    // A layer's input, its products' outputs, and its mixer's result, with room for `room` rows.
    Values normed, product, mixed;
    int64_t threads = 1, room = 0;

    template <class Job> void each_row(int64_t n, const Job& job) {
        share_out((n + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, n < SERIAL_ROWS ? 1 : threads, m.parallel, [&](int64_t part) {
            const int64_t first = part * ROWS_AT_ONCE;
            for (int64_t r = first; r < std::min(first + ROWS_AT_ONCE, n); r++) job(r);
        });
    }

    void multiply(const Value* in, const Weights& w, Value* out, int64_t n) {
        if (w.quantized) return m.quantized_linear(in, w.quantized, out, n, threads, m.parallel);
        m.linear(in, w.values, w.bias, out, n, w.inputs, w.outputs, threads, m.parallel);
    }

    void scale(const Weights& w, Value* out, int64_t n) {
        if (w.multipliers) each_row(n, [&](int64_t r) { scale_row(out + r * w.outputs, w.multipliers, w.outputs); });
    }

    // Finds each adapter's rows among the `kept` rows (null: all rows).
    void group(const Rows& rows, const int64_t* kept, int64_t n) {
        groups.resize(rows.num_adapters), adapted.resize(rows.num_adapters);
        for (auto& group : groups) group.clear();
        for (int64_t i = 0; rows.num_adapters && i < n; i++)
            if (const int32_t owner = rows.owners[kept ? kept[i] : i]; owner >= 0) groups[owner].push_back(i);
        adapters = rows.adapters;
    }

    // Computes one of a layer's products, including the rows' adapters.
    void project(size_t l, Product which, const Value* in, const Weights& w, Value* out, int64_t n) {
        multiply(in, w, out, n);
        if (!groups.empty()) add_adapters(l, which, in, w, out, n);
        scale(w, out, n);
    }

    // Lets `compute` write all `width` outputs of each row, or only those of a rank's weights, which are gathered.
    template <class Compute>
    void make_whole(const Weights& w, Value* out, int64_t n, int64_t width, const Compute& compute) {
        if (w.outputs == width) return compute(out);
        part.resize(n * w.outputs);
        compute(part.data());
        gather(part.data(), out, n, w.first, w.outputs, width);
    }

    void attend(const Call& call) { m.attend(m.attention[m.tables[call.layer]], &call); }

    // Activates the `width` values that an MLP's first product makes of a row. If they are gates, they are followed by
    // the values to multiply.
    void activate(const Value* made, int64_t width, Value* out) const {
        if (m.activation == RELU2) square_row(made, width, out);
        else if (m.activation == CLAMPED_SWIGLU) clamped_gate_row(made, width, out);
        else if (m.activation == GELU_TANH) gate_row(made, made + width, width, out, gelu_exponent);
        else gate_row(made, made + width, width, out, [](float x) { return x; });
    }

    // Assembles whole rows from the ranks' parts. This rank has `own` of the `width` values of a row, from `first` on.
    void gather(Values& values, int64_t n, int64_t first, int64_t own, int64_t width) {
        if (own == width) return;
        part.swap(values);
        values.resize(n * width);
        gather(part.data(), values.data(), n, first, own, width);
    }

  private:
    // Adds the rows' adapters to one of a layer's products.
    void add_adapters(size_t l, Product which, const Value* in, const Weights& w, Value* out, int64_t n) {
        const int64_t first = l * PARTS + which;
        const int64_t next = which == QKV ? GATES : which == GATES ? OUTPUT : which == GATE_UP ? DOWN : which + 1;
        for (size_t i = 0; i < groups.size(); i++)
            adapted[i] = {adapters[i] + first, next - which, groups[i].data(), int64_t(groups[i].size())};
        m.adapt(in, w.inputs, out, w.outputs, adapted.data(), adapted.size(), threads, m.parallel);
    }

    void gather(const Value* from, Value* whole, int64_t n, int64_t first, int64_t own, int64_t width) {
        m.gather(m.ranks, from, whole, n, first * sizeof(Value), own * sizeof(Value), width * sizeof(Value));
    }

    Values part;
    std::vector<std::vector<int64_t>> groups;  // each adapter's rows
    std::vector<Adapted> adapted;
    const Part* const* adapters = nullptr;
};

}  // namespace
