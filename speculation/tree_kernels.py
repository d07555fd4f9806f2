"""The Triton kernels of `speculation.tree_growth`, with a program for each tree."""

from __future__ import annotations

import triton
import triton.language as tl

from speculation.drawing import NEAR

_NEAR = tl.constexpr(NEAR)
_NOTHING = tl.constexpr(float("-inf"))
_COUNTS = tl.constexpr(128)
"""Trees whose rows are counted at a time."""


@triton.jit
def _candidates(
    rooms,
    state,
    offered,
    depth,
    most,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return `TreeGrowth._candidates` by number, with ranks, rows followed and the number of rows run."""
    nodes, leaves, leaf_scores, paths, runs = state
    values, token_ids, num_rows = offered
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    is_grown = depth > 0
    num_run = tl.load(runs + 2 * tree, mask=is_grown, other=0)
    count = tl.load(runs + 2 * tree + 1, mask=is_grown, other=1)
    i = tl.arange(0, PADDED)
    is_leaf = (i < LEAVES) & is_grown
    row, child = (i - LEAVES) // CHILDREN, (i - LEAVES) % CHILDREN
    is_child = (i >= LEAVES) & (row < count)
    follows = is_child & is_grown
    at = (tree * num_rows + row) * CHILDREN + child
    leaf, newest = leaves + tree * LEAVES + i, nodes + tree * most + num_run - count + row
    facts = (
        tl.load(leaf, mask=is_leaf, other=0) + tl.load(token_ids + at, mask=is_child, other=0),
        tl.load(leaf + trees * LEAVES, mask=is_leaf, other=0)
        + tl.where(follows, num_run - count + 1 + row, 0),
        tl.load(leaf + 2 * trees * LEAVES, mask=is_leaf, other=0)
        + tl.load(newest + 2 * trees * most, mask=follows, other=0)
        + (is_child & (depth == 0)).to(tl.int64),
        tl.where(is_child, depth.to(tl.int64), tl.load(leaf + 3 * trees * LEAVES, mask=is_leaf, other=0)),
    )
    path = tl.load(paths + tree * WIDTH + row, mask=follows, other=0.0)
    path += tl.load(values + at, mask=is_child, other=_NOTHING).to(tl.float64)
    scores = tl.load(leaf_scores + tree * LEAVES + i, mask=is_leaf, other=_NOTHING)
    scores = tl.where(is_child & (tl.abs(path) < float("inf")), path, scores)
    is_better = scores[None, :] > scores[:, None]
    is_before = (scores[None, :] == scores[:, None]) & (i[None, :] < i[:, None])
    ranks = tl.sum((is_better | is_before).to(tl.int32), 1)
    scores = tl.where(ranks < tl.load(rooms + tree) - num_run, scores, _NOTHING)
    return scores, ranks, facts, row, num_run


@triton.jit
def _place(nodes, facts, places, chosen, most):
    tokens, rows_before, masks, deeper = facts
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    node = nodes + tree * most + places
    tl.store(node, tokens, mask=chosen)
    tl.store(node + trees * most, rows_before, mask=chosen)
    tl.store(node + 2 * trees * most, masks | (tl.full([], 2, tl.int64) << places), mask=chosen)
    tl.store(node + 3 * trees * most, deeper, mask=chosen)


@triton.jit(do_not_specialize=["num_rows", "depth", "most"])
def grow(
    rooms,
    nodes,
    leaves,
    leaf_scores,
    paths,
    sources,
    runs,
    values,
    token_ids,
    num_rows,
    depth,
    most,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (trees,). Run `TreeGrowth.grow`. `values` float32 and `token_ids` int64 [rows, CHILDREN] are the
    candidates of `num_rows` rows per tree. `rooms` int64 [trees] limits each tree's nodes. The other
    pointers are a `GrowthState`.
    """
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    state = (nodes, leaves, leaf_scores, paths, runs)
    offered = (values, token_ids, num_rows)
    scores, ranks, facts, row, num_run = _candidates(
        rooms, state, offered, depth, most, WIDTH, CHILDREN, LEAVES, PADDED
    )
    is_new = (tl.arange(0, PADDED) >= LEAVES) & (scores > _NOTHING)
    places = tl.sum((is_new[None, :] & (ranks[None, :] < ranks[:, None])).to(tl.int32), 1)
    least = tl.max(tl.where(is_new, scores, _NOTHING), 0) + tl.full([], _NEAR, tl.float64)
    chosen = is_new & (places < WIDTH) & (scores >= least)
    tl.debug_barrier()  # after the reads of all threads
    _place(nodes, facts, num_run + places, chosen, most)
    tl.store(paths + tree * WIDTH + places, scores, mask=chosen)
    tl.store(sources + tree * WIDTH + places, row.to(tl.int64), mask=chosen)
    count = tl.sum(chosen.to(tl.int64), 0)
    tl.store(runs + 2 * tree, num_run + count)
    tl.store(runs + 2 * tree + 1, count)
    at, stays = tree * LEAVES + ranks, ranks < LEAVES
    tl.store(leaf_scores + at, tl.where(chosen, _NOTHING, scores), mask=stays)
    for fact in tl.static_range(4):
        tl.store(leaves + fact * trees * LEAVES + at, facts[fact], mask=stays)


@triton.jit(do_not_specialize=["num_rows", "depth", "most"])
def end(
    rooms,
    nodes,
    leaves,
    leaf_scores,
    paths,
    sources,
    runs,
    values,
    token_ids,
    num_rows,
    depth,
    most,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (trees,). Run `TreeGrowth.end`: make nodes of all candidates with room; clear the rest."""
    state = (nodes, leaves, leaf_scores, paths, runs)
    offered = (values, token_ids, num_rows)
    scores, ranks, facts, _, num_run = _candidates(
        rooms, state, offered, depth, most, WIDTH, CHILDREN, LEAVES, PADDED
    )
    chosen = scores > _NOTHING
    _place(nodes, facts, num_run + ranks, chosen, most)
    places = tl.arange(0, LEAVES).to(tl.int64)
    is_left = (places >= num_run + tl.sum(chosen.to(tl.int64), 0)) & (places < most)
    zeros = tl.zeros([LEAVES], tl.int64)
    _place(nodes, (zeros, zeros - 1, zeros + 1, zeros), places, is_left, most)


@triton.jit
def _packed(runs, rows, num_rows):
    """Return for a tree: the number of rows run before this level, its number of rows in the level, the place
    of the first one, and the places of `rows`: after the rows of earlier trees, for padding after all trees'
    rows.
    """
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    before, every = tl.zeros([_COUNTS], tl.int64), tl.zeros([_COUNTS], tl.int64)
    for start in range(0, trees, _COUNTS):
        others = start + tl.arange(0, _COUNTS)
        counts = tl.load(runs + 2 * others + 1, mask=others < trees, other=0)
        before += tl.where(others < tree, counts, 0)
        every += counts
    first, count = tl.sum(before, 0), tl.load(runs + 2 * tree + 1)
    padding = tl.sum(every, 0) + tree * num_rows - first - count
    places = tl.where(rows < count, first, padding) + rows
    return tl.load(runs + 2 * tree) - count, count, first, places


@triton.jit(do_not_specialize=["num_rows", "num_before", "stride", "size"])
def follow(
    hidden,
    out,
    sources,
    runs,
    num_rows,
    num_before,
    stride,
    size,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (trees, tiles). Copy to each row of a level in `out` [rows, size] the row of `hidden` that it
    follows; each tree has `num_before` rows there.
    """
    tree, rows = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    _, count, _, places = _packed(runs, rows, num_rows)
    followed = tree * num_before + tl.load(sources + tree * WIDTH + rows, mask=rows < count, other=0)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (i < size)[None, :]
    values = tl.load(hidden + followed[:, None] * stride + i[None, :], mask=inside)
    tl.store(out + places[:, None] * size + i[None, :], values, mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "depth", "most", "num_tables", "table_stride", "row_stride", "slot_stride"]
)
def lay_out(
    nodes,
    runs,
    tree_start,
    block_table,
    token_ids,
    positions,
    logit_rows,
    visible,
    query_start,
    context_len,
    slot_mapping,
    num_rows,
    depth,
    most,
    num_tables,
    table_stride,
    row_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (trees,). Write a level, `depth` tokens after its roots, to a step's inputs."""
    tree, trees = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    rows = tl.arange(0, PADDED)
    num_before, count, first, places = _packed(runs, rows, num_rows)
    inside, is_run = rows < num_rows, rows < count
    start = tl.load(tree_start + tree).to(tl.int64)
    node = nodes + tree * most + num_before + rows
    tl.store(token_ids + places, tl.load(node, mask=is_run, other=0), mask=inside)
    tl.store(visible + places, tl.load(node + 2 * trees * most, mask=is_run, other=1), mask=inside)
    # Models look up the rotation of padding, too, and its tree may not reach this depth.
    tl.store(positions + places, start + tl.where(is_run, depth, 0), mask=inside)
    last = tl.maximum(first + tl.minimum(rows + 1, count) - 1, 0)
    tl.store(logit_rows + tree * num_rows + rows, last, mask=inside)
    tl.store(query_start + 1 + tree, first + count)
    tl.store(context_len + tree, start + 1 + num_before + count)
    keys = start + 1 + num_before + rows
    for table in range(num_tables):
        block = block_table + table * table_stride + tree * row_stride + keys // BLOCK_SIZE
        slots = tl.load(block, mask=is_run, other=0).to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        tl.store(slot_mapping + table * slot_stride + places, tl.where(is_run, slots, -1), mask=inside)
