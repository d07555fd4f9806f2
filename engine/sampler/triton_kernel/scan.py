"""The pass over the logits: it edits them if asked to and finds the peaks of tiles and of token groups."""

from __future__ import annotations

import triton
import triton.language as tl

_TOGETHER = tl.constexpr(256)


@triton.jit
def _edit(
    values,
    logits,
    edited,
    tokens,
    inside,
    bounds,
    edit_tokens,
    amounts,
    factors,
    masked,
    masks,
    WORDS: tl.constexpr,
):
    """Apply the edits of `edits.edit_lists` to a tile of a row; write it to `edited` and return it. Each step
    reads the results of the one before.
    """
    allowed, biased, forbidden, penalized, end = (
        tl.load(bounds),
        tl.load(bounds + 1),
        tl.load(bounds + 2),
        tl.load(bounds + 3),
        tl.load(bounds + 4),
    )
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
def scan(
    logits,
    edited,
    bounds,
    edit_tokens,
    amounts,
    factors,
    masked,
    masks,
    tops,
    firsts,
    peaks,
    arrivals,
    stride,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: (tiles, rows). Write a tile's greatest value (NaN if any value is) and the first token that has
    it to `tops` and `firsts` [rows, TILES], and each group's greatest value to `peaks` [rows, TILES * TILE /
    GROUP]. Write the float32 logits with all edits, if any, to `edited` [rows, SIZE], and zeros to `arrivals`
    [rows].
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    logits += row * stride
    values = tl.load(logits + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    if edited is not None:
        of_row = edited + row * SIZE
        values = _edit(
            values,
            logits,
            of_row,
            tokens,
            inside,
            bounds + row * 5,
            edit_tokens,
            amounts,
            factors + row * 3,
            masked + row,
            masks,
            WORDS,
        )
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    top = tl.max(values, 0)
    tl.store(firsts + row * TILES + tile, tl.min(tl.where(values == top, tokens, SIZE), 0))
    tl.store(tops + row * TILES + tile, tl.where(has_nan, float("nan"), top))
    groups: tl.constexpr = TILE // GROUP
    peak = tl.max(tl.reshape(values, [groups, GROUP]), 1)
    tl.store(arrivals + row, 0, mask=tile == 0)
    tl.store(peaks + (row * TILES + tile) * groups + tl.arange(0, groups), peak)


@triton.jit
def likeliest(tops, firsts, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    """Return a row's greatest value and its first token, or -1 if no value is finite or any is NaN."""
    tiles = tl.arange(0, PADDED)
    of_tiles = tl.load(tops + row * TILES + tiles, mask=tiles < TILES, other=float("-inf"))
    fails = tl.max((of_tiles != of_tiles).to(tl.int32), 0) > 0
    top = tl.max(of_tiles, 0)
    fails = fails | (tl.abs(top) == float("inf"))
    first = tl.load(firsts + row * TILES + tiles, mask=(tiles < TILES) & (of_tiles == top), other=2147483647)
    return top, tl.where(fails, -1, tl.min(first, 0))
