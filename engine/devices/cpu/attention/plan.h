// Splits a step into tasks for the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "step.h"
#include "tiles.h"

constexpr int SPLIT = 512;      // keys; a multiple of the tile
// The query rows (positions times query heads per KV head) of one task: more share the packed keys, fewer leave no
// thread without a task. Packing a key costs about as much as PACK_COST rows.
#if defined(MATRIX_TILES)
constexpr int MOST_TASK_ROWS = 1024, LEAST_TASK_ROWS = 48, PACK_COST = 30;
#else
constexpr int MOST_TASK_ROWS = 72, LEAST_TASK_ROWS = 72, PACK_COST = 10;
#endif
constexpr int MOST_SUMS = 1 << 18;  // of all rows of a task: 1 MiB, which stays in the L2 cache
constexpr int TASKS_EACH = 4;   // target number of tasks per thread, so that no thread waits long for another

// Query rows [first_query, first_query + queries) of a sequence, for a range of KV heads and a range of splits.
struct Task {
    int sequence, first_query, queries, first_head, heads, first_split, last_split;
    int shared;  // index of the Shared if other tasks have the rest of the splits, or -1
    int64_t cost;
};

// A task cut into pieces for several threads. Each split has a partial result; the last thread to finish merges them.
struct Shared {
    int pieces, splits;
    int64_t partial;  // the first split's first row among the partial results
    std::atomic<int> pieces_left{0};

    Shared(int pieces, int splits, int64_t partial) : pieces(pieces), splits(splits), partial(partial) {}
};

// The tasks of a step for layers whose KV heads have `group` query heads each, the costliest first.
class Plan {
  public:
    int group = 0, kv_heads = 0;
    int64_t cost = 0;          // keys times rows
    int64_t partial_rows = 0;  // rows of the partial results of all `shared`
    std::vector<Task> tasks;
    std::deque<Shared> shared;

    int max_rows() const { return tile_queries() * group; }

    // `width` is the number of a row's sums.
    void build(const Step& step, int num_kv_heads, int query_heads_per_kv_head, int width) {
        group = query_heads_per_kv_head;
        kv_heads = num_kv_heads;
        const int64_t rows = step.total_tokens * group * kv_heads, tasks_wanted = step.threads * TASKS_EACH;
        task_rows = std::clamp(MOST_SUMS / width, LEAST_TASK_ROWS, MOST_TASK_ROWS);
        while (task_rows > LEAST_TASK_ROWS && rows < task_rows * tasks_wanted)
            task_rows = std::max(task_rows / 2, LEAST_TASK_ROWS);
        cost = partial_rows = 0;
        tasks.clear();
        shared.clear();
        each_tile(step, [&](int s, int q, int queries) {
            cost += head_cost(keys_of(step, s, q, queries), queries) * num_kv_heads;
        });
        const int64_t target = step.threads > 1 ? cost / (step.threads * TASKS_EACH) + 1 : cost + 1;
        each_tile(step, [&](int s, int q, int queries) {
            add_tasks(s, q, queries, keys_of(step, s, q, queries), num_kv_heads, target);
        });
        auto costlier = [](const Task& a, const Task& b) { return a.cost > b.cost; };
        std::stable_sort(tasks.begin(), tasks.end(), costlier);
    }

  private:
    int task_rows = MOST_TASK_ROWS;

    int tile_queries() const { return std::max(1, task_rows / group); }
    int64_t head_cost(int64_t keys, int queries) const { return keys * (queries * group + PACK_COST); }
    static int64_t keys_of(const Step& step, int s, int q, int queries) {
        return step.first_position(s) + q + queries;
    }

    template <class Visit> void each_tile(const Step& step, Visit visit) const {
        for (int s = 0; s < step.num_sequences; s++)
            for (int q = 0; q < step.query_len(s); q += tile_queries())
                visit(s, q, std::min(tile_queries(), step.query_len(s) - q));
    }

    // Cuts a tile of query rows into tasks of about the target cost: by splits, so that a token's heads are read
    // together, and if needed by heads.
    void add_tasks(int sequence, int first_query, int queries, int64_t keys, int kv_heads, int64_t target) {
        const int64_t each = head_cost(keys, queries);
        const int splits = int((keys + SPLIT - 1) / SPLIT);
        const int most_heads = std::min(kv_heads, max_rows() / (queries * group));
        const int pieces = int(std::clamp<int64_t>((each * most_heads + target - 1) / target, 1, splits));
        const int heads = int(std::clamp<int64_t>(target * pieces / each, 1, most_heads));
        for (int head = 0; head < kv_heads; head += heads) {
            const int count = std::min(heads, kv_heads - head);
            int index = -1;
            if (pieces > 1) {
                index = int(shared.size());
                shared.emplace_back(pieces, splits, partial_rows);
                partial_rows += int64_t(splits) * count * queries * group;
            }
            for (int p = 0; p < pieces; p++)
                tasks.push_back({sequence, first_query, queries, head, count, splits * p / pieces,
                                 splits * (p + 1) / pieces, index, each * count / pieces});
        }
    }
};
