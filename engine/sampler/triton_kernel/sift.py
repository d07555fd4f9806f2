"""The lists of each tile's tokens that can be chosen, usually few, and the choice among them."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import (
    LEAST,
    SPAN,
    at_order,
    gumbel,
    may_reach,
    noise_bits,
)
from engine.sampler.triton_kernel.scan import likeliest
from engine.sampler.triton_kernel.settle import read_row, settle_row

_SLACK = tl.constexpr(1e-3)
_ROUNDING = tl.constexpr(1e-4)


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
def _low(
    peaks,
    row,
    top,
    top_k,
    temperature,
    min_p_floor,
    top_p,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return a lower bound of the floors of all filters."""
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
def sift(
    logits,
    tops,
    firsts,
    peaks,
    integers,
    numbers,
    counts,
    masses,
    values,
    places,
    arrivals,
    chosen,
    scales,
    stride,
    num_rows,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (tiles, rows). List the tile's tokens that can be chosen, in order, in `values` and `places`
    [rows, TILES, TILE], their number in `counts` [rows, TILES]: with top-k or top-p all that these can leave,
    else all that the noise can lift above the likeliest. If top-p, or `scales` without top-k, needs it,
    `masses` gets min-p's sum of exp. A row's last program lets `settle_row` choose from all of the row's
    lists.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key, top_k, temperature, min_p_floor, top_p = read_row(integers, numbers, row, num_rows)
    top, best = likeliest(tops, firsts, row, TILES, PADDED)
    if (best < 0) | (temperature == 0):
        if tile == 0:
            tl.store(chosen + row, best.to(tl.int64))
        return
    groups: tl.constexpr = TILE // GROUP
    low = _low(peaks, row, top, top_k, temperature, min_p_floor, top_p, SIZE, TILES * groups, PADDED * groups)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.div_rn(value - top, temperature)
    listed = (value > float("-inf")) & (value >= low)
    if (top_k <= 0) & (top_p >= 1):
        bar = gumbel(noise_bits(key, best)) - _ROUNDING
        listed = listed & may_reach(value, noise_bits(key, tokens), bar)
        if scales is not None:
            least = tl.maximum(min_p_floor, -SPAN)
            mass = tl.sum(tl.where(value >= least, tl.exp(value.to(tl.float64)), 0.0), 0)
            tl.store(masses + row * TILES + tile, mass)
    elif top_k <= 0:
        mass = tl.sum(tl.where(value >= min_p_floor, tl.exp(value.to(tl.float64)), 0.0), 0)
        tl.store(masses + row * TILES + tile, mass)
    rank = tl.cumsum(listed.to(tl.int32), 0)
    to = (row * TILES + tile) * TILE + rank - 1
    tl.store(values + to, value, mask=listed)
    tl.store(places + to, (tokens - tile * TILE).to(tl.int16), mask=listed)
    tl.store(counts + row * TILES + tile, tl.sum(listed.to(tl.int32), 0))
    tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
    if tl.atomic_add(arrivals + row, 1) == TILES - 1:
        token = settle_row(
            row,
            tops,
            firsts,
            integers,
            numbers,
            counts,
            masses,
            values,
            places,
            scales,
            num_rows,
            TILES,
            TILE,
            PADDED,
            WIDTH,
        )
        tl.store(chosen + row, token.to(tl.int64))
        tl.store(arrivals + row, 0)
