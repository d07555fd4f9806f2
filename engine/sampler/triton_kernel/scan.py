"""The pass over the logits: it edits them if asked to, and finds each row's likeliest token and a bound of
what its filters leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import LEAST, at_order, gumbel, noise_bits
from engine.sampler.triton_kernel.settle import read_row

_TOGETHER = tl.constexpr(256)
_SLACK = tl.constexpr(1e-3)


@triton.jit
def _edit(values, logits, edited, tokens, inside, edits, WORDS: tl.constexpr):
    """Apply a row's part of the lists of `edits.edit_lists` to a tile; write it to `edited` and return it.
    Each step reads the results of the one before.
    """
    bounds, edit_tokens, amounts, factors, masked, masks = edits
    allowed, biased, forbidden = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)
    penalized, end = tl.load(bounds + 3), tl.load(bounds + 4)
    least, last = tl.min(tokens, 0), tl.max(tokens, 0)
    tl.store(edited + tokens, tl.where(biased > allowed, float("-inf"), values), mask=inside)
    tl.debug_barrier()
    for first in range(allowed, biased, _TOGETHER):
        token, ours = _ours(edit_tokens, first, biased, least, last)
        tl.store(edited + token, tl.load(logits + token, mask=ours).to(tl.float32), mask=ours)
    tl.debug_barrier()
    for first in range(biased, forbidden, _TOGETHER):
        token, ours = _ours(edit_tokens, first, forbidden, least, last)
        bias = tl.load(amounts + first + tl.arange(0, _TOGETHER), mask=ours)
        tl.store(edited + token, tl.load(edited + token, mask=ours) + bias, mask=ours)
    tl.debug_barrier()
    for first in range(forbidden, penalized, _TOGETHER):
        token, ours = _ours(edit_tokens, first, penalized, least, last)
        tl.store(edited + token, tl.full([_TOGETHER], float("-inf"), tl.float32), mask=ours)
    tl.debug_barrier()
    repetition, presence, frequency = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    for first in range(penalized, end, _TOGETHER):
        token, ours = _ours(edit_tokens, first, end, least, last)
        count = tl.load(amounts + first + tl.arange(0, _TOGETHER), mask=ours)
        old = tl.load(edited + token, mask=ours)
        new = tl.where(old > 0, tl.div_rn(old, repetition), old * repetition)
        less = frequency * count + presence * (count > 0).to(tl.float32)
        tl.store(edited + token, new - less, mask=ours)
    tl.debug_barrier()
    number = tl.load(masked).to(tl.int64)
    words = tl.load(masks + number * WORDS + tokens // 32, mask=inside & (number >= 0), other=-1)
    is_allowed = inside & (((words >> (tokens % 32)) & 1) != 0)
    tl.store(
        edited + tokens, tl.full(tokens.shape, float("-inf"), tl.float32), mask=inside & (is_allowed == 0)
    )
    tl.debug_barrier()
    return tl.load(edited + tokens, mask=inside, other=float("-inf"))


@triton.jit
def _ours(edit_tokens, first, end, least, last):
    """Return a list's tokens from entry `first` on, and which of them are in the tile."""
    entries = first + tl.arange(0, _TOGETHER)
    token = tl.load(edit_tokens + entries, mask=entries < end, other=-1)
    return token, (token >= least) & (token <= last)


@triton.jit
def _kth(values, k):
    """Return the k-th greatest value, or the least finite number if there are fewer than k."""
    low, high = tl.full([], LEAST, tl.int32), tl.full([], 0, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_above = tl.sum((values > at_order(middle)).to(tl.int32), 0) >= k
        low, high = tl.where(is_above, middle, low), tl.where(is_above, high, middle)
    return at_order(high)


@triton.jit
def _likeliest(tops, firsts, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    """Return a row's greatest value and its first token, or -1 if no value is finite or any is NaN."""
    tiles = tl.arange(0, PADDED)
    of_tiles = tl.load(tops + row * TILES + tiles, mask=tiles < TILES, other=float("-inf"))
    fails = tl.max((of_tiles != of_tiles).to(tl.int32), 0) > 0
    top = tl.max(of_tiles, 0)
    fails = fails | (tl.abs(top) == float("inf"))
    first = tl.load(firsts + row * TILES + tiles, mask=(tiles < TILES) & (of_tiles == top), other=2147483647)
    return top, tl.where(fails, -1, tl.min(first, 0))


@triton.jit
def _low(peaks, row, top, request, SIZE: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """Return a lower bound of the floors of all filters."""
    _, top_k, temperature, min_p_floor, top_p = request
    groups = tl.arange(0, PADDED)
    of_groups = tl.load(peaks + row * GROUPS + groups, mask=groups < GROUPS, other=float("-inf"))
    of_groups = tl.div_rn(of_groups - top, temperature)
    low = min_p_floor
    if top_k > 0:  # the k-th greatest value of the row is at least the k-th greatest of the groups' peaks
        low = tl.maximum(low, _kth(of_groups, top_k))
    elif (top_p < 1) & (low == float("-inf")):
        # Tokens that are each lighter than this weigh less than 1 - top_p together, so the nucleus is above
        # it.
        mass = tl.sum(tl.exp(of_groups), 0)
        low = tl.log(tl.maximum((1 - top_p).to(tl.float32) * mass / SIZE, 1e-37)) - _SLACK
    return low


@triton.jit(do_not_specialize=["num_rows"])
def scan(
    logits,
    edited,
    bounds,
    edit_tokens,
    amounts,
    factors,
    masked,
    masks,
    integers,
    numbers,
    tops,
    firsts,
    peaks,
    arrivals,
    chosen,
    limits,
    stride,
    num_rows,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (tiles, rows). Write a tile's greatest value (NaN if any value is) and the first token that has
    it to `tops` and `firsts` [rows, TILES], and each group's greatest value to `peaks` [rows, TILES * TILE /
    GROUP]. Write the float32 logits with all edits, if any, to `edited` [rows, SIZE].

    A row's last program writes the likeliest token to `chosen` [rows], -1 if no token has a finite score,
    and, unless the row is greedy, its logit, a lower bound of the filters' floors and its noise to `limits`
    [rows, 3].
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    logits += row * stride
    values = tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if edited is not None:
        of_row = edited + row * SIZE
        edits = bounds + row * 5, edit_tokens, amounts, factors + row * 3, masked + row, masks
        values = _edit(values, logits, of_row, tokens, inside, edits, WORDS)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.max(values, 0)
    tl.store(firsts + row * TILES + tile, tl.min(tl.where(values == top, tokens, SIZE), 0))
    tl.store(tops + row * TILES + tile, tl.where(has_nan, float("nan"), top))
    groups: tl.constexpr = TILE // GROUP
    peak = tl.max(tl.reshape(values, [groups, GROUP]), 1)
    tl.store(peaks + (row * TILES + tile) * groups + tl.arange(0, groups), peak)
    tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
    if tl.atomic_add(arrivals + row, 1) == TILES - 1:
        top, best = _likeliest(tops, firsts, row, TILES, PADDED)
        request = read_row(integers, numbers, row, num_rows)
        key, _, temperature, _, _ = request
        tl.store(chosen + row, best.to(tl.int64))
        if (best >= 0) & (temperature > 0):
            low = _low(peaks, row, top, request, SIZE, TILES * groups, PADDED * groups)
            tl.store(limits + row * 3, top)
            tl.store(limits + row * 3 + 1, low)
            tl.store(limits + row * 3 + 2, gumbel(noise_bits(key, best)))
        tl.store(arrivals + row, 0)
