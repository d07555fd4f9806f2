// Causal attention over a paged KV pool on the CPU, called with plain pointers.
//
// A context is cut into splits at multiples of SPLIT keys. Each split is an online softmax of its own, and a row's
// result merges its splits in order. So splits may run on different threads. The bits of a row's result depend on
// neither the number of threads, nor the other rows of the step, nor whether the row is in a chain or a tree.

#include <utility>

#include "pack.h"
#include "path.h"
#include "plan.h"
#include "softmax.h"
#include "step.h"
#include "stored_codes.h"
#include "tiles.h"

namespace {

constexpr int64_t SERIAL_COST = 200000;  // fewest keys * rows * head_dim that are worth several threads
constexpr int64_t SERIAL_TOKENS = 64;    // most tokens whose keys and values one thread writes
constexpr int64_t WRITTEN_AT_ONCE = 16;

static_assert(SPLIT % TILE == 0, "a tile lies in one split");
static_assert(TILE == 64, "a tile's keys are the bits of a word");

// Memory kept between calls. Each call takes its buffers from the start.
class Scratch {
  public:
    void reserve(size_t floats) {
        if (memory.size() < floats + 16) memory.resize(floats + 16);
        next = memory.data() + (16 - uintptr_t(memory.data()) / 4 % 16) % 16;
    }
    float* take(size_t floats) {
        float* taken = next;
        next += rounded(floats);
        return taken;
    }
    static size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

  private:
    std::vector<float> memory;
    float* next = nullptr;
};

class Attention {
  public:
    explicit Attention(const Pool& pool)
        : pool(pool), layers(pool.layers, pool.layers + pool.num_layers) {}

    const char* begin(const Step& given) {
        if (const char* fault = given.fault(pool)) return fault;
        step = given;
        plan.group = 0;
        return nullptr;
    }

    void forward(const Call& given) {
        call = given;
        layer = &layers[call.layer];
        const int group = int(call.num_heads / layer->num_kv_heads);
        const int layer_width = int(layer->value_dim + LANES - 1) / LANES * LANES;
        if (plan.group != group || plan.kv_heads != layer->num_kv_heads || width != layer_width) {
            width = layer_width;
            plan.build(step, int(layer->num_kv_heads), group, width);
            partials.reserve(plan.partial_rows * RowState::stride(width));
            first_partial = partials.take(0);
            if (scratch.size() < size_t(step.threads)) scratch.resize(step.threads);
        }
        for (Shared& shared : plan.shared) shared.pieces_left = shared.pieces;
        const int64_t chunks = (step.total_tokens + WRITTEN_AT_ONCE - 1) / WRITTEN_AT_ONCE;
        share_out(chunks, step.total_tokens > SERIAL_TOKENS ? step.threads : 1, step.parallel,
                  [this](int64_t chunk) { write_rows(chunk); });
        const bool threads_pay = plan.cost * (layer->key_dim + layer->value_dim) / 2 >= SERIAL_COST && step.parallel;
        threads_running = threads_pay ? step.threads : 1;
        next_task = 0;
        on_threads(threads_running, step.parallel, [this](int64_t thread) { attend(thread); });
    }

  private:
    void write_rows(int64_t chunk);
    template <class Query> void write_row(int64_t token);
    template <class Element, class Query> void write_heads(int64_t token, int64_t slot);
    void attend(int64_t thread);
    template <class Math, class Element, class Query> void attend_as(int64_t thread);
    template <class Math, class Element, class Query> struct Worker;

    const Pool pool;
    const std::vector<KvLayer> layers;
    const KvLayer* layer = nullptr;  // the call's layer
    int width = 0;                 // the layer's value_dim, rounded up to whole vectors
    Step step{};
    Call call{};
    Plan plan;
    Scratch partials;
    float* first_partial = nullptr;
    std::vector<Scratch> scratch;  // one per thread
    std::atomic<int64_t> next_task{0};
    int64_t threads_running = 1;
};

void Attention::write_rows(int64_t chunk) {
    const int64_t first = chunk * WRITTEN_AT_ONCE;
    for (int64_t token = first; token < std::min(first + WRITTEN_AT_ONCE, step.total_tokens); token++)
        pool.is_bf16 ? write_row<uint16_t>(token) : write_row<float>(token);
}

// Writes a token's key and value to its slot. A padding row has no slot; its output becomes zero.
template <class Query> void Attention::write_row(int64_t token) {
    const int64_t slot = step.slots[token];
    if (slot < 0) {
        auto* out = static_cast<Query*>(call.out) + token * call.out_token;
        for (int64_t h = 0; h < call.num_heads; h++) memset(out + h * call.out_head, 0, layer->value_dim * sizeof(Query));
        return;
    }
    switch (pool.stored) {
        case INT8: return write_heads<Int8, Query>(token, slot);
        case FP8: return write_heads<Fp8, Query>(token, slot);
        default: return write_heads<Query, Query>(token, slot);
    }
}

template <class Query> static void put(const Query* row, int head_dim, Query* to, float*) {
    memcpy(to, row, head_dim * sizeof(Query));
}
template <class Query> static void put(const Query* row, int head_dim, Int8* to, float* scale) {
    encode(row, head_dim, to, scale);
}
template <class Query> static void put(const Query* row, int head_dim, Fp8* to, float* scale) {
    encode(row, head_dim, to, scale);
}

template <class Element, class Query> void Attention::write_heads(int64_t token, int64_t slot) {
    const int key_dim = int(layer->key_dim), value_dim = int(layer->value_dim);
    const auto* key = static_cast<const Query*>(call.key) + token * call.key_token;
    const auto* value = static_cast<const Query*>(call.value) + token * call.value_token;
    const int64_t block = slot / pool.block_size * pool.block_stride, offset = slot % pool.block_size;
    const int64_t key_place = block + offset * layer->key_stride, value_place = block + offset * layer->value_stride;
    auto* keys = static_cast<Element*>(layer->keys) + key_place;
    auto* values = static_cast<Element*>(layer->values) + value_place;
    const auto scale = [](float* scales, int64_t place) { return is_coded<Element> ? scales + place / 4 : nullptr; };
    float* key_scales = scale(layer->key_scales, key_place);
    float* value_scales = scale(layer->value_scales, value_place);
    for (int64_t h = 0; h < layer->num_kv_heads; h++) {
        put(key + h * call.key_head, key_dim, keys + h * key_dim, key_scales + h);
        if (values != keys) put(value + h * call.value_head, value_dim, values + h * value_dim, value_scales + h);
    }
}

void Attention::attend(int64_t thread) {
    if (pool.stored == INT8 && pool.is_bf16) return attend_as<WholeMath, Int8, uint16_t>(thread);
    if (pool.stored == INT8) return attend_as<WholeMath, Int8, float>(thread);
#if defined(MATRIX_TILES)
    if (pool.is_bf16 && layer->key_dim % (2 * TileMath::DEPTH) == 0 && TileRegisters::are_granted()) {
        if (pool.stored == FP8) return attend_as<TileMath, Fp8, uint16_t>(thread);
        return attend_as<TileMath, uint16_t, uint16_t>(thread);
    }
#endif
#if defined(BF16_PAIRS)
    if (pool.stored == FP8 && pool.is_bf16) return attend_as<PairMath, Fp8, uint16_t>(thread);
    if (pool.is_bf16 && layer->key_dim % 2 == 0) return attend_as<PairMath, uint16_t, uint16_t>(thread);
#else
    if (pool.stored == FP8 && pool.is_bf16) return attend_as<FloatMath, Fp8, uint16_t>(thread);
#endif
    if (pool.stored == FP8) return attend_as<FloatMath, Fp8, float>(thread);
    if (pool.is_bf16) return attend_as<FloatMath, uint16_t, uint16_t>(thread);
    return attend_as<FloatMath, float, float>(thread);
}

template <class Math, class Element, class Query> void Attention::attend_as(int64_t thread) {
    Worker<Math, Element, Query> worker(*this, scratch[thread]);
    for (size_t i; (i = next_task++) < plan.tasks.size();) {
        const size_t after = i + threads_running;
        worker.run(plan.tasks[i], after < plan.tasks.size() ? &plan.tasks[after] : nullptr);
    }
}

// One thread's buffers and loops. A task's rows are ordered by KV head, then query position, then head of the group.
template <class Math, class Element, class Query> struct Attention::Worker {
    typedef typename Math::Word Word;
    static constexpr bool CODED = is_coded<Element>;
    static constexpr int PLACES = Math::PER_WORD * Math::DEPTH;  // number of keys that a product's depth is a multiple of
    static constexpr bool READABLE = std::is_same_v<Math, FloatMath> && !CODED;  // whether values are read as stored
    static constexpr bool READABLE_CODES = Math::WHOLE && READS_CODES;  // whether keys and values are
    static constexpr bool READABLE_KEYS = Math::TILES && !CODED;  // whether keys are, as the first factor of tiles
    struct Origin {
        int query, head;
        Sight sight;
    };

    Worker(Attention& attention, Scratch& scratch)
        : a(attention), step(a.step), call(a.call), how(float(call.scale), float(call.softcap)),
          key_dim(int(a.layer->key_dim)), value_dim(int(a.layer->value_dim)), words(key_dim / Math::PER_WORD),
          width(a.width), origins(a.plan.max_rows()) {
        const size_t rows = a.plan.max_rows(), states = rows * RowState::stride(width);
        const size_t scales = CODED ? size_t(TILE) * a.layer->num_kv_heads : 0;
        const size_t sizes[] = {rows * words,          2 * size_t(TILE) * words, size_t(TILE) * width,
                                size_t(16) * std::max(key_dim, value_dim),
                                3 * Math::ROWS * TILE, Math::ROWS * TILE,        states,
                                states,                CODED ? rows : 0,         2 * scales,
                                scales,                READABLE_CODES ? rows * key_dim / 2 : 0,
                                READABLE_KEYS ? size_t(16) * words * a.layer->num_kv_heads : 0};
        size_t floats = 0;
        for (size_t size : sizes) floats += Scratch::rounded(size);
        scratch.reserve(floats);
        queries = (Word*)scratch.take(sizes[0]);
        keys = (Word*)scratch.take(sizes[1]);
        values = (Word*)scratch.take(sizes[2]);
        buffer = (Word*)scratch.take(sizes[3]);
        scores = scratch.take(sizes[4]);
        weights = (Word*)scratch.take(sizes[5]);
        total = {scratch.take(sizes[6]), width};
        partial = {scratch.take(sizes[7]), width};
        units = scratch.take(sizes[8]);
        key_scales = scratch.take(sizes[9]);
        value_scales = scratch.take(sizes[10]);
        query_bytes = (int8_t*)scratch.take(sizes[11]);
        query_columns = (Word*)scratch.take(sizes[12]);
    }

    // `after` is probably this thread's next task, so its first keys are prefetched.
    void run(const Task& task, const Task* after) {
        head_rows = task.queries * a.plan.group;
        rows = head_rows * task.heads;
        first_token = step.query_start[task.sequence] + task.first_query;
        key_distance = distance(a.layer->keys, a.layer->key_scales, task, key_dim);
        value_distance = distance(a.layer->values, a.layer->value_scales, task, value_dim);
        load_queries(task);
        const auto [begin, end] = keys_of(task);
        locate(task, begin, end, *next);
        Shared* shared = task.shared < 0 ? nullptr : &a.plan.shared[task.shared];
        for (int split = task.first_split; split < task.last_split; split++) {
            const bool first = split == task.first_split;
            const RowState state = shared ? state_of(*shared, split) : first ? total : partial;
            state.clear(rows);
            const int64_t split_end = std::min(end, (split + 1) * int64_t(SPLIT));
            for (int64_t key = std::max(begin, split * int64_t(SPLIT)); key < split_end; key += TILE) {
                std::swap(tile, next);
                locate_next(task, key + TILE, end, after);
                attend_tile(task, key, state);
            }
            if (!shared && !first) fold(total, partial, rows);
        }
        if (!shared) return finish(total);
        if (shared->pieces_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        const RowState folded = state_of(*shared, 0);
        for (int split = 1; split < shared->splits; split++) fold(folded, state_of(*shared, split), rows);
        finish(folded);
    }

    RowState state_of(const Shared& shared, int split) const {
        return {a.first_partial + (shared.partial + int64_t(split) * rows) * RowState::stride(width), width};
    }

    void load_queries(const Task& task) {
        int r = 0;
        byte_queries.clear();
        for (int head = 0; head < task.heads; head++)
            for (int q = 0; q < task.queries; q++) {
                const Sight sight = step.sight(task.sequence, task.first_query + q, call.window);
                for (int g = 0; g < a.plan.group; g++, r++) {
                    origins[r] = {q, (task.first_head + head) * a.plan.group + g, sight};
                    const int64_t offset = (first_token + q) * call.query_token + origins[r].head * call.query_head;
                    const Query* row = static_cast<const Query*>(call.query) + offset;
                    const float unit = load_query(row, key_dim, buffer, queries + r * words, words);
                    if (CODED) units[r] = unit;
                    if constexpr (READABLE_CODES)
                        if (can_read_stored())
                            byte_queries.emplace_back((const int16_t*)buffer, key_dim, query_bytes + 2 * r * key_dim);
                }
            }
        if constexpr (READABLE_KEYS)
            for (int head = 0; can_read_keys() && head < task.heads; head++)
                transpose_rows(queries + head * head_rows * words, words, head_rows, words, columns_of(head), 16);
    }

    // Returns the keys [first, last) of a task's splits that any of its rows may see.
    std::pair<int64_t, int64_t> keys_of(const Task& task) const {
        const int64_t seen = step.first_seen_from(task.sequence, task.first_query, call.window);
        return {std::max(task.first_split * int64_t(SPLIT), seen & ~int64_t(TILE - 1)),
                std::min(task.last_split * int64_t(SPLIT), last_key(task))};
    }

    // Returns the end (exclusive) of the keys that any row of the task sees.
    int64_t last_key(const Task& task) const {
        return step.first_position(task.sequence) + task.first_query + task.queries;
    }

    void locate(const Task& task, int64_t first_key, int64_t end, TileRows<Element>& to) const {
        const auto* keys = static_cast<const Element*>(a.layer->keys) + task.first_head * key_dim;
        const auto* values = static_cast<const Element*>(a.layer->values) + task.first_head * value_dim;
        const int64_t key_stride = a.layer->key_stride, value_stride = a.layer->value_stride;
        int64_t block = first_key / a.pool.block_size, offset = first_key % a.pool.block_size;
        to.count = int(std::clamp<int64_t>(end - first_key, 0, TILE));
        for (int k = 0; k < to.count; block++, offset = 0) {
            const int64_t start = step.block(task.sequence, block) * a.pool.block_stride;
            const Element* key = keys + start + offset * key_stride;
            const Element* value = values + start + offset * value_stride;
            const int last = int(std::min<int64_t>(to.count, k + a.pool.block_size - offset));
            for (; k < last; k++, key += key_stride, value += value_stride) to.keys[k] = key, to.values[k] = value;
        }
        for (int k = to.count; k % 16; k++) to.keys[k] = to.keys[k - 1], to.values[k] = to.values[k - 1];
    }

    void locate_next(const Task& task, int64_t key, int64_t end, const Task* after) {
        next->count = 0;
        if (key < end) return locate(task, key, end, *next);
        if (!after) return;
        const auto [begin_after, end_after] = keys_of(*after);
        locate(*after, begin_after, end_after, *next);
    }

    void attend_tile(const Task& task, int64_t first_key, const RowState& state) {
        const bool in_tree = step.is_tree(task.sequence) && first_key + TILE > step.tree_start[task.sequence];
        reads_stored = !in_tree && can_read_stored(), reads_keys = !in_tree && can_read_keys();
        const int places = reads_stored ? 7 : 11;  // fetches for a head: 4 for keys, 4 to pack values, then 3
        Sweep<Element> sweep{*next, key_dim * task.heads, value_dim * task.heads, 2 * TILE / task.heads / places + 1,
                             key_distance, value_distance};
        if (in_tree) locate(task, first_key + TILE, last_key(task), behind);
        if constexpr (CODED) {
            take_scales(tile->keys, tile->count, key_distance, task.heads, key_scales);
            take_scales(tile->values, tile->count, value_distance, task.heads, value_scales);
            if (in_tree) take_scales(behind.keys, behind.count, key_distance, task.heads, key_scales_of(1, 0));
        }
        for (int head = 0; head < task.heads; head++) {
            if (!reads_keys && !(READABLE_CODES && reads_stored)) take_keys(*tile, head, sweep, 0);
            if (!reads_stored) take_values(*tile, head, sweep, 0);
            if (in_tree) {
                attend_paths(task, head, first_key, sweep, state);
                continue;
            }
            const int first = head * head_rows, last = first + head_rows;
            for (int row = first; row < last; row += Math::ROWS)
                attend_rows(row, std::min(Math::ROWS, last - row), first_key, head, sweep, state);
        }
    }

    // Returns whether a head has so few rows that packing would cost more than it saves.
    bool can_read_stored() const {
        if (READABLE) return head_rows <= Math::ROWS && width == value_dim;
        return READABLE_CODES && head_rows <= MAX_BYTE_ROWS && key_dim % 16 == 0 && value_dim % 64 == 0;
    }

    // Returns whether a head's scores are cheaper to transpose than its keys, and 16 keys lie in one block.
    bool can_read_keys() const { return READABLE_KEYS && head_rows <= 16 && a.pool.block_size % 16 == 0; }

    Word* columns_of(int head) const { return query_columns + head * words * 16; }

    // Packs the keys of `from` as tile i: 0 for the current tile, 1 for the tile after it.
    void take_keys(const TileRows<Element>& from, int head, Sweep<Element>& sweep, int i) {
        pack_keys(from, int64_t(head) * key_dim, key_dim, words, sweep, buffer, keys + i * TILE * words);
    }

    // Packs values to the places from `first` on, a multiple of the keys in a word, and zeros to the places after them
    // that a product multiplies too.
    void take_values(const TileRows<Element>& from, int head, Sweep<Element>& sweep, int first) {
        const auto place = [&](int key) { return values + key / Math::PER_WORD * width; };
        pack_values(from, int64_t(head) * value_dim, value_dim, sweep, width, buffer, place(first));
        Word* const after = place(rounded_up(first + from.count, Math::PER_WORD));
        std::fill(after, std::max(after, place(rounded_up(first + from.count, PLACES))), Word(0));
    }

    // Returns the bytes from a row of the task's first head to the scales of the task's heads.
    static int64_t distance(const void* rows, const float* scales, const Task& task, int head_dim) {
        return CODED ? (const char*)(scales + task.first_head) - ((const char*)rows + task.first_head * head_dim) : 0;
    }
    float* key_scales_of(int i, int head) const { return key_scales + (i * a.layer->num_kv_heads + head) * TILE; }

    // Attends to a tile with keys of the tree: moves each row's keys to the places that they would have in a chain, so
    // that the row's result has the same bits as in a chain.
    void attend_paths(const Task& task, int head, int64_t first_key, Sweep<Element>& sweep, const RowState& state) {
        const int64_t start = step.tree_start[task.sequence];
        take_keys(behind, head, sweep, 1);
        const int in_place = int(std::clamp<int64_t>(start - first_key, 0, TILE)) / Math::PER_WORD * Math::PER_WORD;
        for (int q = 0; q < task.queries; q++) {
            const Path path(step.path(task.sequence, task.first_query + q), start - first_key);
            if (path.end <= in_place) continue;
            TileRows<Element> moved;
            for (int k = in_place; k < path.end; k++)
                moved.values[moved.count++] = (path.from[k] < TILE ? *tile : behind).values[path.from[k] % TILE];
            take_values(moved, head, sweep, in_place);
            if constexpr (CODED)
                for (int k = 0; k < moved.count; k++)
                    value_scales[head * TILE + in_place + k] = scale_of(moved.values[k], value_distance, head);
            const int first = head * head_rows + q * a.plan.group, last = first + a.plan.group;
            for (int row = first; row < last; row += Math::ROWS)
                attend_rows(row, std::min(Math::ROWS, last - row), first_key, head, sweep, state, &path);
        }
    }

    void attend_rows(int row, int count, int64_t first_key, int head, Sweep<Element>& sweep, const RowState& state,
                     const Path* path = nullptr) {
        uint64_t seen[Math::ROWS], by_any = 0;
        for (int r = 0; r < count; r++) by_any |= seen[r] = origins[row + r].sight.in_tile(first_key);
        if (by_any == 0) return;
        const int most = 64 - __builtin_clzll(by_any);
        const int places = rounded_up(most, PLACES), groups = (places + 15) / 16, depth = places / Math::PER_WORD;
        float rescale[MOST_ROWS];
        sweep.fetch();
        if (path) {
            score_path(row, count, head, *path);
        } else if (READABLE_CODES && reads_stored) {
            if constexpr (READABLE_CODES) score_stored(row, count, groups * 16, head, sweep);
        } else if (READABLE_KEYS && reads_keys) {
            if constexpr (READABLE_KEYS) score_keys(count, head, sweep);
        } else {
            score(row, count, head, 0, groups * 16, scores);
        }
        sweep.fetch();
        if constexpr (CODED) {
            softmax_of<UnscaledWeights>(groups, count, scores, seen, how, state, row, scores, rescale);
        } else {
            softmax_of<Math>(groups, count, scores, seen, how, state, row, weights, rescale);
        }
        sweep.fetch();
        if constexpr (CODED) {
            float weight_units[Math::ROWS];
            for (int r = 0; r < count; r++)
                weight_units[r] =
                    weigh<Math>(scores + r * TILE, value_scales + head * TILE, groups * 16, weights + r * TILE);
            if constexpr (Math::WHOLE) {
                rescale_rows(state.output(row), state.stride(), count, width, rescale);
                if constexpr (READABLE_CODES)
                    if (reads_stored)
                        return add_codes(tile->values, head * value_dim, value_dim, most, count, weights, weight_units,
                                         sweep, state.output(row), state.stride());
                std::copy(weight_units, weight_units + count, rescale);
            }
        }
        const auto add = [&](const auto& rows) {
            product_of<Math, true>(registers, count, weights, TILE, rows, depth, rescale, state.output(row),
                                   state.stride(), width / LANES);
        };
        if constexpr (READABLE)
            if (reads_stored) return add(InPlace<Element>{tile->values, head * value_dim});
        add(Packed<Word>{values, width});
    }

    // Computes the scores of the first `num_keys` keys of tile i.
    void score(int row, int count, int head, int i, int num_keys, float* to) {
        product_of<Math, false>(registers, count, queries + row * words, words,
                                Packed<Word>{keys + i * TILE * words, TILE}, words, units + row, to, TILE,
                                num_keys / LANES);
        if constexpr (CODED) scale_scores(count, num_keys, key_scales_of(i, head), to);
    }

    // Computes the scores of the current tile, reading its keys as stored.
    void score_stored(int row, int count, int num_keys, int head, Sweep<Element>& sweep) {
        score_codes(tile->keys, head * key_dim, key_dim, num_keys, count, &byte_queries[row], units + row, sweep,
                    scores);
        scale_scores(count, num_keys, key_scales_of(0, head), scores);
    }

#if defined(MATRIX_TILES)
    // Computes the scores of a head's only rows, reading the current tile's keys as stored.
    void score_keys(int count, int head, Sweep<Element>& sweep) {
        const int num_keys = rounded_up(tile->count, 16);  // no row sees those after the tile's last
        auto* const products = (float*)keys;  // [key][16 rows]
        const int64_t key_bytes = a.layer->key_stride * int64_t(sizeof(Element));
        multiply_keys(registers, count, tile->keys, int64_t(head) * key_dim, key_bytes, num_keys, columns_of(head), words,
                      products);
        for (int key = 0; key < num_keys; key += 16) {
            sweep.fetch();
            transpose_rows(products + key * 16, 16, 16, rounded_up(count, 4), scores + key, TILE);
        }
    }
#endif

    static void scale_scores(int rows, int num_keys, const float* scales, float* to) {
        for (int r = 0; r < rows; r++, to += TILE)
            for (int k = 0; k < num_keys; k += LANES) store(to + k, load(to + k) * load(scales + k));
    }

    // Scores the current tile and the next, then moves the scores to the places that their keys would have in a chain.
    void score_path(int row, int count, int head, const Path& path) {
        float* found[] = {scores + Math::ROWS * TILE, scores + 2 * Math::ROWS * TILE};
        const int counts[] = {tile->count, behind.count};
        for (int i = 0; i < 2; i++) score(row, count, head, i, (counts[i] + 15) / 16 * 16, found[i]);
        for (int r = 0; r < count; r++)
            for (int k = 0; k < path.end; k++)
                scores[r * TILE + k] = found[path.from[k] / TILE][r * TILE + path.from[k] % TILE];
    }

    void finish(const RowState& state) const {
        for (int r = 0; r < rows; r++) {
            const int64_t token = first_token + origins[r].query;
            if (step.slots[token] < 0) continue;
            const int64_t offset = token * call.out_token + origins[r].head * call.out_head;
            const float* sink = call.sinks ? call.sinks + origins[r].head : nullptr;
            write_output(state.output(r), inverse_sum(state, r, sink), value_dim, static_cast<Query*>(call.out) + offset);
        }
    }

    static int rounded_up(int number, int multiple) { return (number + multiple - 1) / multiple * multiple; }

    Attention& a;
    const Step& step;
    const Call& call;
    const ScoreScale how;
    const int key_dim, value_dim, words, width;
    int64_t key_distance = 0, value_distance = 0;
    std::vector<Origin> origins;
    Word *queries, *query_columns, *keys, *values, *buffer, *weights;
    float *scores, *units, *key_scales, *value_scales;  // [head][TILE]; keys': current tile, then the next
    RowState total, partial;
    TileRows<Element> tiles[2], *tile = &tiles[0], *next = &tiles[1], behind;
    int rows = 0, head_rows = 0;
    std::vector<ByteQuery> byte_queries;
    int8_t* query_bytes;
    bool reads_stored = false;  // whether the tile is read as stored, not packed
    bool reads_keys = false;    // whether its keys are
    int64_t first_token = 0;
    typename Math::Registers registers;
};

}  // namespace

extern "C" {

void* tandem_attention_create(const Pool* pool) { return new Attention(*pool); }

void tandem_attention_destroy(void* attention) { delete static_cast<Attention*>(attention); }

// Returns the name of the field that is out of range, or null.
const char* tandem_attention_begin(void* attention, const Step* step) {
    return static_cast<Attention*>(attention)->begin(*step);
}

void tandem_attention_forward(void* attention, const Call* call) {
    static_cast<Attention*>(attention)->forward(*call);
}
}
