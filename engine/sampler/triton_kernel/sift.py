"""The lists of each tile's tokens that can be chosen, usually few, and the choice among them."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import ROUNDING, SPAN, UNIT, may_reach, noise_bits
from engine.sampler.triton_kernel.settle import read_row, settle_row


@triton.jit(do_not_specialize=["num_rows"])
def sift(
    logits,
    limits,
    integers,
    numbers,
    counts,
    masses,
    values,
    weights,
    places,
    arrivals,
    chosen,
    scales,
    stride,
    num_rows,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (tiles, rows). List the tile's tokens that can be chosen, in order, in `values` and `places`
    [rows, TILES, TILE], their number in `counts` [rows, TILES]: with top-k or top-p all that these can leave,
    else all that the noise can lift above the likeliest. If top-p or `scales` needs them, `weights` gets the
    listed tokens' exp, and without top-k `masses` [rows, TILES] min-p's sum of exp. A row's last program lets
    `settle_row` choose from all of the row's lists.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key, top_k, temperature, min_p_floor, top_p = read_row(integers, numbers, row, num_rows)
    best = tl.load(chosen + row)
    if (best < 0) | (temperature == 0):
        return
    top, low = tl.load(limits + row * 3), tl.load(limits + row * 3 + 1)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.div_rn(value - top, temperature)
    listed = (value > float("-inf")) & (value >= low)
    if (top_k <= 0) & (top_p >= 1):
        bar = tl.load(limits + row * 3 + 2) - ROUNDING
        listed = listed & may_reach(value, noise_bits(key, tokens), bar)
        if scales is not None:
            least = tl.maximum(min_p_floor, -SPAN)
            mass = tl.sum(tl.where(value >= least, tl.exp(value.to(tl.float64)), 0.0), 0)
            tl.store(masses + row * TILES + tile, mass)
    elif top_k <= 0:
        mass = tl.sum(tl.where(value >= min_p_floor, tl.exp(value.to(tl.float64)), 0.0), 0)
        tl.store(masses + row * TILES + tile, mass)
    to = tl.cumsum(listed.to(tl.int32), 0) - 1
    first = (row * TILES + tile) * TILE
    tl.store(values + first + to, value, mask=listed)
    tl.store(places + first + to, (tokens - tile * TILE).to(tl.int16), mask=listed)
    count = tl.sum(listed.to(tl.int32), 0)
    tl.store(counts + row * TILES + tile, count)
    if (top_p < 1) | (scales is not None):
        tl.debug_barrier()
        for begin in range(0, count, TILE // 4):
            at = begin + tl.arange(0, TILE // 4)
            one = tl.load(values + first + at, mask=at < count, other=0.0).to(tl.float64)
            tl.store(weights + first + at, (tl.exp(one) * UNIT + 0.5).to(tl.int64), mask=at < count)
    tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
    if tl.atomic_add(arrivals + row, 1) == TILES - 1:
        requests, lists = (integers, numbers, num_rows), (values, weights, places)
        likeliest = best.to(tl.int32)
        token = settle_row(
            row, likeliest, limits, requests, counts, masses, lists, scales, TILES, TILE, PADDED, WIDTH
        )
        tl.store(chosen + row, token.to(tl.int64))
        tl.store(arrivals + row, 0)
