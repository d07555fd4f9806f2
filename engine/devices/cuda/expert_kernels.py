"""Kernels before the products of experts: one chooses each row's experts and lists their rows, one lists the
rows of experts that are chosen already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.model.program import Score

_SIGMOID, _CHOSEN_SOFTMAX = tl.constexpr(int(Score.SIGMOID)), tl.constexpr(int(Score.CHOSEN_SOFTMAX))
_TAKEN = tl.constexpr(-(1 << 63))
"""The key of an expert that is not to be chosen: the least."""
TILE_FIELDS = tl.constexpr(3)
"""A tile's expert, -1 if there is no tile, its first place and the end of its places."""


@triton.jit
def _keys(ranks, last):
    """Return integers that are ordered as float32 ranks, and at equal ranks as the numbers `last`."""
    bits = ranks.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | last


@triton.jit
def _rank_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _of_open_groups(keys, ROWS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, OPEN: tl.constexpr):
    """Leave the keys of the OPEN groups with the highest sums of their two best experts' ranks. A row of keys
    has GROUPS groups of SIZE, both powers of two.
    """
    grouped = tl.reshape(keys, (ROWS, GROUPS, SIZE))
    best = tl.max(grouped, 2)
    second = tl.max(tl.where(grouped == best[:, :, None], _TAKEN, grouped), 2)
    sums, group = _rank_of(best) + _rank_of(second), tl.arange(0, GROUPS)
    own, other = sums[:, :, None], sums[:, None, :]
    is_better = (other > own) | ((other == own) & (group[None, :] < group[:, None])[None, :, :])
    is_open = tl.sum(is_better.to(tl.int32), 2) < OPEN
    return tl.reshape(tl.where(is_open[:, :, None], grouped, _TAKEN), (ROWS, GROUPS * SIZE))


@triton.jit
def _enlist(experts, entries, is_entry, counters, places, num_rows):
    """Give each of `entries` the next of its expert's `places` [experts, num_rows]; count them."""
    place = tl.atomic_add(counters + experts, 1, mask=is_entry)
    tl.store(places + experts * num_rows + place, entries, mask=is_entry)


@triton.jit
def _is_last(counter, count):
    """Count the program; return whether `count` programs are counted. The last one leaves 0, and sees what
    the others have stored.
    """
    tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
    is_last = tl.atomic_add(counter, 1) == count - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _list_tiles(
    counters,
    tiles,
    num_tiles,
    num_rows,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """In the last program, cut each expert's places into tiles of ROWS, expert by expert, and leave zeros in
    `counters`. SHARED experts after the others have all rows.
    """
    if _is_last(counters + PADDED, tl.num_programs(0)):
        expert = tl.arange(0, PADDED)
        count = tl.load(counters + expert, mask=expert < EXPERTS, other=0)
        tl.debug_barrier()  # several warps load the counters of few experts, and one clears them
        tl.store(counters + expert, 0, mask=expert < EXPERTS)
        count = tl.where((expert >= EXPERTS) & (expert < EXPERTS + SHARED), num_rows, count)
        each = (count + ROWS - 1) // ROWS
        end = tl.cumsum(each, 0)
        for number in range(tl.max(each, 0)):
            tile, is_tile = tiles + (end - each + number) * TILE_FIELDS, number < each
            first = number * ROWS
            tl.store(tile, expert, mask=is_tile)
            tl.store(tile + 1, expert * num_rows + first, mask=is_tile)
            tl.store(tile + 2, expert * num_rows + tl.minimum(first + ROWS, count), mask=is_tile)
        for first in range(tl.max(end, 0), num_tiles, PADDED):
            tl.store(tiles + (first + expert) * TILE_FIELDS, -1, mask=first + expert < num_tiles)


@triton.jit
def _sums(parts, row, column, is_inside, num_rows, OUTPUTS: tl.constexpr, SPANS: tl.constexpr):
    """Add up the products of the spans of inputs, in order."""
    total = tl.zeros(is_inside.shape, tl.float32)
    for span in tl.static_range(SPANS):
        total += tl.load(parts + (span * num_rows + row) * OUTPUTS + column, mask=is_inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "least_sum", "scaling"])
def route(
    x,
    router,
    bias,
    preferences,
    factors,
    parts,
    counters,
    chosen,
    weights,
    places,
    tiles,
    num_rows,
    num_tiles,
    least_sum,
    scaling,
    INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    EACH_PADDED: tl.constexpr,
    OPEN: tl.constexpr,
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SCORE: tl.constexpr,
    IS_EXACT: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Grid: (ROWS rows, COLUMNS outputs of the `router` [OUTPUTS, INPUTS], SPAN inputs). The last program of
    a tile of rows chooses their experts, TOGETHER rows at a time: it writes them to `chosen`, if given, their
    weights to `weights`, both [rows, CHOSEN + SHARED], and their rows to `places`, if given. The last program
    of all then writes `tiles`, int32 [num_tiles, TILE_FIELDS]. `counters` are zeros, which it leaves.

    A SHARED expert follows the others; its weight is 1, or the sigmoid of the router's last output if that
    has more OUTPUTS than EXPERTS.
    """
    SPANS: tl.constexpr = (INPUTS + SPAN - 1) // SPAN
    ENTRIES: tl.constexpr = CHOSEN + SHARED
    tile = tl.program_id(0)
    m, n = tile * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    is_row, is_output = (m < num_rows)[:, None], n < OUTPUTS
    own = x + m.to(tl.int64)[:, None] * INPUTS + k[None, :]
    columns = router + n[:, None] * INPUTS + k[None, :]
    begin = tl.program_id(2) * SPAN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, tl.minimum(begin + SPAN, INPUTS), DEPTH):
        inside = (start + k < INPUTS)[None, :]
        inputs = tl.load(own + start, mask=is_row & inside, other=0.0).to(router.dtype.element_ty)
        outputs = tl.load(columns + start, mask=is_output[:, None] & inside, other=0.0)
        total = tl.dot(inputs, outputs.T, total, input_precision="ieee")
    place = parts + (tl.program_id(2) * num_rows + m)[:, None] * OUTPUTS + n[None, :]
    tl.store(place, total, mask=is_row & is_output[None, :])
    if not _is_last(counters + PADDED + 1 + tile, tl.num_programs(1) * tl.num_programs(2)):
        return
    EACH: tl.constexpr = EXPERTS // GROUPS
    ALL: tl.constexpr = GROUPS_PADDED * EACH_PADDED
    i = tl.arange(0, ALL)
    expert = i // EACH_PADDED * EACH + i % EACH_PADDED
    is_expert = (i % EACH_PADDED < EACH) & (i // EACH_PADDED < GROUPS)
    wanted = 0.0
    if preferences is not None:
        wanted = tl.load(preferences + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    offset = 0.0
    if bias is not None:
        offset = tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    number = tl.arange(0, WIDTH)[None, :]
    for first in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, num_rows), TOGETHER):
        row = first + tl.arange(0, TOGETHER)
        is_live = row < num_rows
        is_inside = is_live[:, None] & is_expert[None, :]
        values = _sums(parts, row[:, None], expert[None, :], is_inside, num_rows, OUTPUTS, SPANS) + offset
        if not IS_EXACT:
            values = values.to(x.dtype.element_ty).to(tl.float32)
        if SCORE == _SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-values))
            if ROUNDS:
                scores = scores.to(weights.dtype.element_ty).to(tl.float32)
        elif SCORE == _CHOSEN_SOFTMAX:
            scores = values
        else:
            values = tl.where(is_expert[None, :], values, float("-inf"))
            scores = tl.exp(values - tl.max(values, 1)[:, None])
            scores = scores / tl.sum(scores, 1)[:, None]
        keys = tl.where(is_expert[None, :], _keys(scores + wanted, (ALL - 1 - i)[None, :]), _TAKEN)
        if OPEN < GROUPS:
            keys = _of_open_groups(keys, TOGETHER, GROUPS_PADDED, EACH_PADDED, OPEN)
        best = tl.zeros((TOGETHER, WIDTH), tl.int32)
        kept = tl.zeros((TOGETHER, WIDTH), tl.float32)
        for each in tl.static_range(CHOSEN):
            top = tl.max(keys, 1)
            is_top = keys == top[:, None]
            best = tl.where(number == each, (ALL - 1 - (top & 0xFFFFFFFF)).to(tl.int32)[:, None], best)
            kept = tl.where(number == each, tl.sum(tl.where(is_top, scores, 0.0), 1)[:, None], kept)
            keys = tl.where(is_top, _TAKEN, keys)
        best = tl.minimum(best // EACH_PADDED * EACH + best % EACH_PADDED, EXPERTS - 1)
        is_kept = number < CHOSEN
        kept = tl.where(is_kept, kept, float("-inf") if SCORE == _CHOSEN_SOFTMAX else 0.0)
        if SCORE == _CHOSEN_SOFTMAX:
            kept = tl.exp(kept - tl.max(kept, 1)[:, None])
            kept = kept / tl.sum(kept, 1)[:, None]
        if NORMALIZES:
            kept = kept / (tl.sum(kept, 1)[:, None] + least_sum)
        kept = kept * scaling
        if factors is not None:
            kept = kept * tl.load(factors + best).to(tl.float32)
        if SHARED > 0:
            share = tl.full((TOGETHER,), 1.0, tl.float32)
            if OUTPUTS > EXPERTS:
                opening = _sums(parts, row, EXPERTS, is_live, num_rows, OUTPUTS, SPANS)
                opening = opening.to(x.dtype.element_ty).to(tl.float32)
                share = 1.0 / (1.0 + tl.exp(-opening))
            best = tl.where(is_kept, best, EXPERTS)
            kept = tl.where(is_kept, kept, share[:, None])
        entries = row[:, None] * ENTRIES + number
        is_entry = is_live[:, None] & (number < ENTRIES)
        tl.store(weights + entries, kept.to(weights.dtype.element_ty), mask=is_entry)
        if chosen is not None:
            tl.store(chosen + entries, best.to(tl.int64), mask=is_entry)
        if places is not None:
            _enlist(best, entries, is_entry & is_kept, counters, places, num_rows)
            if SHARED > 0:
                rest = places + EXPERTS * num_rows + row[:, None] + tl.zeros((1, WIDTH), tl.int32)
                tl.store(rest, entries, mask=is_entry & (number == CHOSEN))
    if places is not None:
        _list_tiles(counters, tiles, num_tiles, num_rows, EXPERTS, SHARED, PADDED, ROWS)


@triton.jit(do_not_specialize=["num_entries", "num_rows", "num_tiles"])
def assign(
    chosen,
    counters,
    places,
    tiles,
    num_entries,
    num_rows,
    num_tiles,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (BLOCK entries). List the rows of each expert, as `route` does, for the experts `chosen`, int64
    [num_entries]; an expert outside has no places.
    """
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    experts = tl.load(chosen + entries, mask=entries < num_entries, other=EXPERTS)
    is_entry = (experts >= 0) & (experts < EXPERTS)
    _enlist(experts.to(tl.int32), entries, is_entry, counters, places, num_rows)
    _list_tiles(counters, tiles, num_tiles, num_rows, EXPERTS, 0, PADDED, ROWS)
