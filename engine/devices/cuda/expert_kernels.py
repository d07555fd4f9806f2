"""Kernels around the products of experts: one chooses each row's experts, one finds each expert's rows, one
adds up the results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.model.program import Score

_SIGMOID, _CHOSEN_SOFTMAX = tl.constexpr(int(Score.SIGMOID)), tl.constexpr(int(Score.CHOSEN_SOFTMAX))
TILE_FIELDS = tl.constexpr(3)
"""A tile's expert, -1 if there is no tile, its first place and the end of its places."""


@triton.jit
def _of_open_groups(ranks, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr):
    """Leave the ranks of the OPEN groups with the highest sums of their two best experts' ranks."""
    group = experts // (EXPERTS // GROUPS)
    sums = tl.full(ranks.shape, float("-inf"), tl.float32)
    for each in tl.static_range(GROUPS):
        own = tl.where(group == each, ranks, float("-inf"))
        best = tl.max(own, 0)
        first = tl.min(tl.where(own == best, experts, EXPERTS - 1), 0)
        second = tl.max(tl.where(experts == first, float("-inf"), own), 0)
        sums = tl.where(experts == each, best + second, sums)
    left = ranks
    for _ in tl.static_range(OPEN):
        opened = tl.min(tl.where(sums == tl.max(sums, 0), experts, GROUPS - 1), 0)
        sums = tl.where(experts == opened, float("-inf"), sums)
        left = tl.where(group == opened, float("-inf"), left)
    return tl.where(left == ranks, float("-inf"), ranks)


@triton.jit(do_not_specialize=["least_sum", "scaling"])
def route(
    logits,
    preferences,
    chosen,
    weights,
    least_sum,
    scaling,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    OPEN: tl.constexpr,
    SCORE: tl.constexpr,
    ROUNDS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    """Grid: (rows). Write a row's best experts to `chosen` and their weights to `weights` [rows, CHOSEN]."""
    row, experts = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    is_expert = experts < EXPERTS
    values = tl.load(logits + row * EXPERTS + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    if SCORE == _SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
        if ROUNDS:
            scores = scores.to(weights.dtype.element_ty).to(tl.float32)
    elif SCORE == _CHOSEN_SOFTMAX:
        scores = values
    else:
        scores = tl.exp(values - tl.max(values, 0))
        scores = scores / tl.sum(scores, 0)
    ranks = scores
    if preferences is not None:
        ranks += tl.load(preferences + experts, mask=is_expert, other=0.0).to(tl.float32)
    ranks = tl.where(is_expert, ranks, float("-inf"))
    if OPEN < GROUPS:
        ranks = _of_open_groups(ranks, experts, EXPERTS, GROUPS, OPEN)
    number = tl.arange(0, WIDTH)
    best, kept = tl.zeros([WIDTH], tl.int64), tl.zeros([WIDTH], tl.float32)
    for each in tl.static_range(CHOSEN):
        expert = tl.min(tl.where(ranks == tl.max(ranks, 0), experts, EXPERTS - 1), 0)
        best = tl.where(number == each, expert.to(tl.int64), best)
        kept = tl.where(number == each, tl.sum(tl.where(experts == expert, scores, 0.0), 0), kept)
        ranks = tl.where(experts == expert, float("-inf"), ranks)
    if SCORE == _CHOSEN_SOFTMAX:
        kept = tl.where(number < CHOSEN, kept, float("-inf"))
        kept = tl.exp(kept - tl.max(kept, 0))
        kept = kept / tl.sum(kept, 0)
    if NORMALIZES:
        kept = kept / (tl.sum(kept, 0) + least_sum)
    place = row * CHOSEN + number
    tl.store(chosen + place, best, mask=number < CHOSEN)
    tl.store(weights + place, (kept * scaling).to(weights.dtype.element_ty), mask=number < CHOSEN)


@triton.jit
def _ids(chosen, at, end, EXPERTS: tl.constexpr):
    """Load the chosen experts from `at` on; EXPERTS stands for none."""
    ids = tl.load(chosen + at, mask=at < end, other=EXPERTS)
    return tl.where((ids < 0) | (ids > EXPERTS), EXPERTS, ids).to(tl.int32)


@triton.jit(do_not_specialize=["num_chosen", "num_tiles"])
def assign(
    chosen,
    places,
    tiles,
    num_chosen,
    num_tiles,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (EXPERTS,). Sort the indices of `chosen`, int64 [num_chosen], by expert into `places`, int32. Cut
    each expert's places into tiles of ROWS, and list these in `tiles`, int32 [num_tiles, TILE_FIELDS].
    """
    own, i, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, PADDED)
    counts = tl.zeros([PADDED], tl.int32)
    for first in range(0, num_chosen, BLOCK):
        counts += tl.histogram(_ids(chosen, first + i, num_chosen, EXPERTS), PADDED)
    each = (counts + ROWS - 1) // ROWS
    place, tile = tl.sum(tl.where(bins < own, counts, 0), 0), tl.sum(tl.where(bins < own, each, 0), 0)
    end = place + tl.sum(tl.where(bins == own, counts, 0), 0)
    for first in range(place, end, ROWS):
        tl.store(tiles + tile * TILE_FIELDS, own)
        tl.store(tiles + tile * TILE_FIELDS + 1, first)
        tl.store(tiles + tile * TILE_FIELDS + 2, tl.minimum(first + ROWS, end))
        tile += 1
    if own == EXPERTS - 1:
        for first in range(tile, num_tiles, BLOCK):
            tl.store(tiles + (first + i) * TILE_FIELDS, -1, mask=first + i < num_tiles)
    for first in range(0, num_chosen, BLOCK):
        is_own = _ids(chosen, first + i, num_chosen, EXPERTS) == own
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(places + place + rank - 1, first + i, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def combine(
    rows, weights, beside, opening, out, CHOSEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: (rows of `out`, blocks). Add up the rows of a row's experts, times `weights` [rows, CHOSEN], and
    its row of `beside`, if given, times the sigmoid of its `opening`, if given.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(CHOSEN):
        at = row * CHOSEN + number
        values = tl.load(rows + at * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        weighted = values * tl.load(weights + at).to(tl.float32)
        total += weighted.to(weights.dtype.element_ty).to(tl.float32)
    if beside is not None:
        more = tl.load(beside + row * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        if opening is not None:
            gate = 1.0 / (1.0 + tl.exp(-tl.load(opening + row).to(tl.float32)))
            more = (
                (more * gate.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
            )
        total = more + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, total.to(out.dtype.element_ty), mask=i < SIZE)
