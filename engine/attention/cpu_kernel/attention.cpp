// Causal attention over a paged KV pool on the CPU: plain pointers in, plain pointers out.
//
// A context is cut at multiples of SPLIT keys, wherever its query rows are; each split is an online softmax
// of its own, and a row's result folds its splits in order. So splits may run on different threads, and
// neither their number nor the other rows of the step show in the bits of a row's result.

#include <atomic>
#include <deque>
#include <vector>

#include "tile.h"

namespace {

constexpr int SPLIT = 512;           // keys; a multiple of TILE
constexpr int TASK_ROWS = 72;        // query rows (positions times heads of the group) of one task
constexpr int PACK_COST = 10;        // packing a key costs about as much as this many query rows
constexpr int64_t SERIAL_COST = 200000;  // below this many keys * rows * head_dim, threads don't pay

struct Pool {
    void* data;
    int64_t block_stride, layer_stride, side_stride;  // in elements
    int64_t num_blocks, block_size, num_kv_heads, head_dim;
    int64_t is_bf16;
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null
};

struct Step {
    const int32_t *query_start, *context_len, *block_table;
    const int64_t* slots;
    int64_t table_stride, num_sequences, total_tokens, threads;
};

struct Call {
    const void *query, *key, *value;
    void* out;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head, out_token, out_head;
    int64_t layer, num_heads, window;
    double scale, softcap;
};

// Query rows [first_query, first_query + queries) of a sequence for some KV heads' groups and some splits.
struct Task {
    int sequence, first_query, queries, first_head, heads, first_split, last_split;
    int shared;  // index of the Shared if other tasks have the rest of the splits, or -1
    int64_t cost;
};

// A task cut into pieces: their splits' partial results, and who comes last folds them.
struct Shared {
    int pieces, splits;
    int64_t partial;  // where the first split's rows begin in Attention::partials
    std::atomic<int> pieces_left;

    Shared(int pieces, int splits, int64_t partial) : pieces(pieces), splits(splits), partial(partial) {}
};

struct Scratch {
    float* take(size_t floats) {
        float* p = next;
        next += (floats + 15) / 16 * 16;
        return p;
    }
    void reserve(size_t floats) {
        if (memory.size() < floats + 16) memory.resize(floats + 16);
        next = memory.data() + (16 - (uintptr_t(memory.data()) / 4) % 16) % 16;
    }
    std::vector<float> memory;
    float* next = nullptr;
};

class Attention {
  public:
    explicit Attention(const Pool& pool) : pool(pool), width((pool.head_dim + LANES - 1) / LANES * LANES) {}

    const char* begin(const Step& given) {
        step = given;
        planned_group = 0;
        return check();
    }

    void forward(const Call& given) {
        call = given;
        group = int(call.num_heads / pool.num_kv_heads);
        if (planned_group != group) plan();
        run(step.total_tokens >= 64 ? step.threads : 1, &Attention::write_rows);
        for (Shared& s : shared) s.pieces_left = s.pieces;
        run(total_cost * pool.head_dim >= SERIAL_COST ? step.threads : 1, &Attention::attend);
    }

  private:
    const char* check() const;
    void plan();
    void add_tasks(int sequence, int first_query, int queries, int64_t target);
    void run(int threads, void (Attention::*work)(int));
    void write_rows(int thread);
    void attend(int thread);
    template <class Element> void write_row(int64_t token);
    template <class Math, class Element> void attend_as(int thread);
    template <class Math, class Element> struct Worker;

    int max_rows() const { return std::max(1, TASK_ROWS / group) * group; }
    int query_len(int s) const { return step.query_start[s + 1] - step.query_start[s]; }

    Pool pool;
    int width;  // head_dim rounded up to whole vectors
    Step step{};
    Call call{};
    int group = 0, planned_group = 0;
    int64_t total_cost = 0, num_partials = 0;
    std::vector<Task> tasks;
    std::deque<Shared> shared;
    std::vector<float> partials;
    std::vector<Scratch> scratch;
    std::atomic<int64_t> next_item{0};
    std::atomic<int> next_thread{0};
    int threads_running = 1;
    void (Attention::*work)(int) = nullptr;
};

const char* Attention::check() const {
    for (int64_t s = 0; s < step.num_sequences; s++) {
        const int64_t context = step.context_len[s];
        if (step.query_start[s] < 0 || query_len(s) < 0 || step.query_start[s + 1] > step.total_tokens)
            return "query_start";
        if (query_len(s) > context || context > step.table_stride * pool.block_size) return "context_len";
        for (int64_t b = 0; b * pool.block_size < context; b++) {
            const int32_t block = step.block_table[s * step.table_stride + b];
            if (block < 0 || block >= pool.num_blocks) return "block_table";
        }
    }
    for (int64_t t = 0; t < step.total_tokens; t++)
        if (step.slots[t] >= pool.num_blocks * pool.block_size) return "slot_mapping";
    return nullptr;
}

void Attention::plan() {
    planned_group = group;
    tasks.clear();
    shared.clear();
    num_partials = 0;
    const int tile_queries = std::max(1, TASK_ROWS / group);
    auto each_tile = [&](auto visit) {
        for (int s = 0; s < step.num_sequences; s++)
            for (int q = 0; q < query_len(s); q += tile_queries)
                visit(s, q, std::min(tile_queries, query_len(s) - q));
    };
    total_cost = 0;
    each_tile([&](int s, int q, int queries) {
        const int64_t keys = step.context_len[s] - query_len(s) + q + queries;
        total_cost += keys * (queries * group + PACK_COST) * pool.num_kv_heads;
    });
    const int64_t target = step.threads > 1 ? total_cost / (step.threads * 4) + 1 : total_cost + 1;
    each_tile([&](int s, int q, int queries) { add_tasks(s, q, queries, target); });
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });

    if (partials.size() < size_t(num_partials)) partials.resize(num_partials);
    scratch.resize(std::max<size_t>(scratch.size(), step.threads));
}

// Cuts a tile of query rows into tasks of about the target cost: by heads, and if that isn't enough, by splits.
void Attention::add_tasks(int sequence, int first_query, int queries, int64_t target) {
    const int64_t keys = step.context_len[sequence] - query_len(sequence) + first_query + queries;
    const int64_t head_cost = keys * (queries * group + PACK_COST);
    const int kv_heads = int(pool.num_kv_heads), splits = int((keys + SPLIT - 1) / SPLIT);
    const int heads = int(std::clamp<int64_t>(target / head_cost, 1, max_rows() / (queries * group)));
    const int pieces = int(std::clamp<int64_t>((head_cost + target - 1) / target, 1, splits));
    for (int head = 0; head < kv_heads; head += heads) {
        const int count = std::min(heads, kv_heads - head);
        int index = -1;
        if (pieces > 1) {
            index = int(shared.size());
            shared.emplace_back(pieces, splits, num_partials);
            num_partials += int64_t(splits) * count * queries * group * (width + 2 * LANES);
        }
        for (int p = 0; p < pieces; p++)
            tasks.push_back({sequence, first_query, queries, head, count, splits * p / pieces,
                             splits * (p + 1) / pieces, index, head_cost * count / pieces});
    }
}

void Attention::run(int threads, void (Attention::*given)(int)) {
    work = given;
    next_item = 0;
    next_thread = 0;
    threads_running = pool.parallel ? threads : 1;
    if (threads_running <= 1) return (this->*work)(0);
    auto entry = [](void* self) {
        auto* attention = static_cast<Attention*>(self);
        (attention->*attention->work)(attention->next_thread++);
    };
    pool.parallel(entry, this, unsigned(threads), 0);
}

void Attention::write_rows(int) {
    constexpr int64_t CHUNK = 16;
    for (int64_t first; (first = CHUNK * next_item++) < step.total_tokens;)
        for (int64_t token = first; token < std::min(first + CHUNK, step.total_tokens); token++)
            pool.is_bf16 ? write_row<uint16_t>(token) : write_row<float>(token);
}

// Puts a token's key and value into its slot; a padding row's output becomes zero.
template <class Element> void Attention::write_row(int64_t token) {
    const size_t bytes = pool.head_dim * sizeof(Element);
    const int64_t slot = step.slots[token];
    if (slot < 0) {
        for (int64_t h = 0; h < call.num_heads; h++)
            memset((Element*)call.out + token * call.out_token + h * call.out_head, 0, bytes);
        return;
    }
    Element* to = (Element*)pool.data + slot / pool.block_size * pool.block_stride + call.layer * pool.layer_stride +
                  slot % pool.block_size * pool.num_kv_heads * pool.head_dim;
    for (int64_t h = 0; h < pool.num_kv_heads; h++, to += pool.head_dim) {
        memcpy(to, (const Element*)call.key + token * call.key_token + h * call.key_head, bytes);
        memcpy(to + pool.side_stride, (const Element*)call.value + token * call.value_token + h * call.value_head,
               bytes);
    }
}

// One thread's buffers and loops.
template <class Math, class Element> struct Attention::Worker {
    typedef typename Math::Word Word;

    Worker(Attention& attention, Scratch& scratch)
        : a(attention), how(float(a.call.scale), float(a.call.softcap)), head_dim(int(a.pool.head_dim)),
          words(head_dim / Math::PER_WORD), width(a.width) {
        const int max_rows = a.max_rows();
        const size_t state = size_t(max_rows) * (width + 2 * LANES);
        const size_t sizes[] = {size_t(max_rows) * words, size_t(TILE) * words, size_t(TILE) * width,
                                16 * size_t(head_dim), BLOCK_ROWS * TILE, BLOCK_ROWS * TILE, state, state};
        size_t floats = 0;
        for (size_t size : sizes) floats += size + 16;
        scratch.reserve(floats);
        queries = (Word*)scratch.take(sizes[0]);
        keys = (Word*)scratch.take(sizes[1]);
        values = (Word*)scratch.take(sizes[2]);
        buffer = (Word*)scratch.take(sizes[3]);
        scores = scratch.take(sizes[4]);
        weights = (Word*)scratch.take(sizes[5]);
        total = {scratch.take(sizes[6]), width};
        partial = {scratch.take(sizes[7]), width};
        origins.resize(max_rows);
    }

    // `after` is a guess at this thread's next task, whose first keys are fetched ahead.
    void run(const Task& task, const Task* after) {
        head_rows = task.queries * a.group;
        rows = head_rows * task.heads;
        first_position = a.step.context_len[task.sequence] - a.query_len(task.sequence) + task.first_query;
        first_token = a.step.query_start[task.sequence] + task.first_query;
        load_queries(task);
        const auto [begin, end] = keys_of(task);
        locate(task, begin, end, *next);
        bool first = true;
        for (int split = task.first_split; split < task.last_split; split++) {
            const RowState state = task.shared >= 0 ? state_of(a.shared[task.shared], split) : first ? total : partial;
            state.clear(rows);
            const int64_t split_end = std::min(end, (split + 1) * int64_t(SPLIT));
            for (int64_t key = std::max(begin, split * int64_t(SPLIT)); key < split_end; key += TILE) {
                std::swap(tile, next);
                if (key + TILE < end)
                    locate(task, key + TILE, end, *next);
                else if (after)
                    locate(*after, keys_of(*after).first, keys_of(*after).second, *next);
                else
                    next->count = 0;
                attend_tile(task, key, state);
            }
            if (task.shared < 0 && !first) fold(total, partial, rows);
            first = false;
        }
        if (task.shared < 0) return finish(total);
        Shared& shared = a.shared[task.shared];
        if (shared.pieces_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        for (int split = 1; split < shared.splits; split++) fold(state_of(shared, 0), state_of(shared, split), rows);
        finish(state_of(shared, 0));
    }

    RowState state_of(const Shared& shared, int split) const {
        return {a.partials.data() + shared.partial + int64_t(split) * rows * (width + 2 * LANES), width};
    }

    // Rows are ordered by KV head, query position, head of the group.
    void load_queries(const Task& task) {
        for (int r = 0, head = task.first_head * a.group; head < (task.first_head + task.heads) * a.group; head += a.group)
            for (int q = 0; q < task.queries; q++)
                for (int g = 0; g < a.group; g++, r++) {
                    origins[r] = {q, head + g};
                    const Element* row = (const Element*)a.call.query + (first_token + q) * a.call.query_token +
                                         (head + g) * a.call.query_head;
                    memcpy(queries + r * words, as_words(row, head_dim, buffer), words * sizeof(Word));
                }
    }

    // The keys of a task's splits that any of its rows may see: [first, last).
    std::pair<int64_t, int64_t> keys_of(const Task& task) const {
        const int64_t position = a.step.context_len[task.sequence] - a.query_len(task.sequence) + task.first_query;
        int64_t first = task.first_split * int64_t(SPLIT);
        if (a.call.window) first = std::max(first, (position - a.call.window + 1) & ~int64_t(TILE - 1));
        return {first, std::min<int64_t>(task.last_split * int64_t(SPLIT), position + task.queries)};
    }

    void locate(const Task& task, int64_t first_key, int64_t end, TileRows<Element>& rows) const {
        const int32_t* table = a.step.block_table + task.sequence * a.step.table_stride;
        const Element* base =
            (const Element*)a.pool.data + a.call.layer * a.pool.layer_stride + task.first_head * head_dim;
        int64_t block = first_key / a.pool.block_size, offset = first_key % a.pool.block_size;
        rows.to_value = a.pool.side_stride;
        rows.count = int(std::clamp<int64_t>(end - first_key, 0, TILE));
        for (int k = 0; k < rows.count; k++) {
            rows.keys[k] = base + table[block] * a.pool.block_stride + offset * a.pool.num_kv_heads * head_dim;
            if (++offset == a.pool.block_size) block++, offset = 0;
        }
    }

    void attend_tile(const Task& task, int64_t first_key, const RowState& state) {
        Sweep<Element> sweep{*next, head_dim * task.heads};
        const int quota = (2 * TILE / task.heads + 11) / 12;
        for (int head = 0; head < task.heads; head++) {
            pack_keys<Math>(*tile, head * head_dim, head_dim, buffer, keys, sweep, quota);
            pack_values(*tile, head * head_dim, head_dim, width, values, sweep, quota);
            for (int row = 0; row < head_rows; row += BLOCK_ROWS)
                attend_rows(head * head_rows + row, std::min(BLOCK_ROWS, head_rows - row), first_key, state, sweep, quota);
        }
    }

    void attend_rows(int row, int count, int64_t first_key, const RowState& state, Sweep<Element>& sweep, int quota) {
        int low[BLOCK_ROWS], high[BLOCK_ROWS], most = 0;
        for (int r = 0; r < count; r++) {
            const int64_t position = first_position + origins[row + r].query;
            high[r] = int(std::min<int64_t>(tile->count, position + 1 - first_key));
            low[r] = a.call.window ? int(std::max<int64_t>(0, position + 1 - a.call.window - first_key)) : 0;
            most = std::max(most, low[r] < high[r] ? high[r] : 0);
        }
        if (most == 0) return;
        const int groups = (most + 15) / 16, depth = (most + Math::PER_WORD - 1) / Math::PER_WORD;
        sweep.fetch(quota);
        product_of<Math, false>(count, queries + row * words, words, keys, TILE, words, nullptr, scores, TILE,
                                groups * 16 / LANES);
        sweep.fetch(quota);
        float rescale[BLOCK_ROWS];
        softmax_of<Math>(groups, count, scores, low, high, how, state, row, weights, rescale);
        sweep.fetch(quota);
        product_of<Math, true>(count, weights, TILE, values, width, depth, rescale, state.output(row), state.stride(),
                               width / LANES);
    }

    void finish(const RowState& state) {
        for (int r = 0; r < rows; r++) {
            const int64_t token = first_token + origins[r].query;
            if (a.step.slots[token] < 0) continue;
            Element* out = (Element*)a.call.out + token * a.call.out_token + origins[r].head * a.call.out_head;
            write_output(state.output(r), 1 / sum_of_lanes(load(state.sums(r))), head_dim, out);
        }
    }

    Attention& a;
    const ScoreScale how;
    const int head_dim, words, width;
    Word *queries, *keys, *values, *buffer, *weights;
    float* scores;
    RowState total, partial;
    struct Origin {
        int query, head;
    };
    std::vector<Origin> origins;
    TileRows<Element> tiles[2], *tile = &tiles[0], *next = &tiles[1];
    int rows = 0, head_rows = 0;
    int64_t first_position = 0, first_token = 0;
};

template <class Math, class Element> void Attention::attend_as(int thread) {
    Worker<Math, Element> worker(*this, scratch[thread]);
    for (size_t i; (i = next_item++) < tasks.size();) {
        const size_t after = i + size_t(threads_running);
        worker.run(tasks[i], after < tasks.size() ? &tasks[after] : nullptr);
    }
}

void Attention::attend(int thread) {
#if defined(BF16_PAIRS)
    if (pool.is_bf16 && pool.head_dim % 2 == 0) return attend_as<PairMath, uint16_t>(thread);
#endif
    if (pool.is_bf16) return attend_as<FloatMath, uint16_t>(thread);
    return attend_as<FloatMath, float>(thread);
}

}  // namespace

extern "C" {

void* tandem_attention_create(const Pool* pool) { return new Attention(*pool); }

void tandem_attention_destroy(void* attention) { delete static_cast<Attention*>(attention); }

// Returns the name of the field that leads outside the pool, or null.
const char* tandem_attention_begin(void* attention, const Step* step) {
    return static_cast<Attention*>(attention)->begin(*step);
}

void tandem_attention_forward(void* attention, const Call* call) {
    static_cast<Attention*>(attention)->forward(*call);
}
}
