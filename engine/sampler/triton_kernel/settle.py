"""Lists each tile's tokens that can be chosen, usually few, and chooses each row's token: the filters' floor
among those listed, then the race.

`weigh` writes down the distributions that rows' tokens are drawn from.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import (
    LEAST,
    ROUNDING,
    SPAN,
    UNIT,
    at_order,
    gumbel,
    may_reach,
    noise_bits,
    order,
    stream_key,
)


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


_EXACTLY = tl.constexpr(1 - 2.0**-49)
"""A factor that makes a sum of rounded weights as much as `top_p` asks for, if it exactly is."""


@triton.jit
def read_row(integers, numbers, row, num_rows):
    """Load the request parameters of a row: the noise key, top-k, temperature, min-p's floor and top-p."""
    seed = tl.load(integers + row)
    position = tl.load(integers + num_rows + row)
    top_k = tl.load(integers + 2 * num_rows + row).to(tl.int32)
    temperature = tl.load(numbers + row).to(tl.float32)
    min_p_floor = tl.load(numbers + num_rows + row).to(tl.float32)
    top_p = tl.load(numbers + 2 * num_rows + row)
    return stream_key(seed, position), top_k, temperature, min_p_floor, top_p


@triton.jit
def _above(bound, listed, WEIGHED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the number of listed values above `bound`, and the sum of their weights in units of 1 / UNIT."""
    lists, lengths, longest, values, weights, _ = listed
    counts = tl.zeros([PADDED, WIDTH], tl.int32)
    masses = tl.zeros([PADDED, WIDTH], tl.int64)
    for first in range(0, longest, WIDTH):
        at = first + tl.arange(0, WIDTH)
        place, here = lists[:, None] + at[None, :], at[None, :] < lengths[:, None]
        is_above = tl.load(values + place, mask=here, other=float("-inf")) > bound
        counts += is_above.to(tl.int32)
        if WEIGHED:
            masses += tl.load(weights + place, mask=here & is_above, other=0)
    count = tl.sum(tl.sum(counts, 1), 0)
    mass = tl.sum(tl.sum(masses, 1).to(tl.float64), 0) if WEIGHED else count.to(tl.float64)
    return count, mass


@triton.jit
def _mass(masses, row, TILES: tl.constexpr, PADDED: tl.constexpr):
    """Return the sum of the tiles' masses in units of 1 / UNIT."""
    tiles = tl.arange(0, PADDED)
    return tl.sum(tl.load(masses + row * TILES + tiles, mask=tiles < TILES, other=0.0), 0) * UNIT


@triton.jit
def _floor(wanted, low, count, listed, WEIGHED: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the least of the `count` listed values from `low` on that has less than `wanted` above it."""
    outside, inside = order(low) - 1, tl.full([], 0, tl.int32)
    num_outside, num_inside = count, tl.full([], 0, tl.int32)
    # A single value between the two is inside as well: no more is above it than above `inside`.
    while (inside - outside > 1) & (num_outside - num_inside > 1):
        middle = outside + (inside - outside) // 2
        number, mass = _above(at_order(middle), listed, WEIGHED, PADDED, WIDTH)
        is_inside = mass < wanted
        inside, num_inside = tl.where(is_inside, middle, inside), tl.where(is_inside, number, num_inside)
        outside, num_outside = tl.where(is_inside, outside, middle), tl.where(is_inside, num_outside, number)
    return at_order(outside + 1)


@triton.jit
def _least(floor, listed, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the least listed value that is at least `floor`."""
    lists, lengths, longest, values, _, _ = listed
    least = tl.zeros([PADDED, WIDTH], tl.float32)
    for first in range(0, longest, WIDTH):
        at = first + tl.arange(0, WIDTH)
        value = tl.load(values + lists[:, None] + at[None, :], mask=at[None, :] < lengths[:, None], other=0.0)
        least = tl.minimum(least, tl.where(value >= floor, value, 0.0))
    return tl.min(tl.min(least, 1), 0)


@triton.jit
def _race(key, best, score, floor, listed, TILE: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """Return the token with the greatest value + noise, the first of equal ones. `best` has the value 0 and
    the noise `score`.
    """
    lists, lengths, longest, values, _, places = listed
    bar = score - ROUNDING
    for first in range(0, longest, WIDTH):
        at = first + tl.arange(0, WIDTH)
        here = at[None, :] < lengths[:, None]
        value = tl.load(values + lists[:, None] + at[None, :], mask=here, other=float("-inf"))
        place = tl.load(places + lists[:, None] + at[None, :], mask=here, other=0)
        tokens = tl.arange(0, PADDED)[:, None] * TILE + place.to(tl.int32)
        bits = noise_bits(key, tokens)
        races = here & (value >= floor) & may_reach(value, bits, bar)
        if tl.max(tl.max(races.to(tl.int32), 1), 0) > 0:
            scores = tl.where(races, value + gumbel(bits), float("-inf"))
            greatest = tl.max(tl.max(scores, 1), 0)
            token = tl.min(tl.min(tl.where(scores == greatest, tokens, 2147483647), 1), 0)
            wins = (greatest > score) | ((greatest == score) & (token < best))
            best, score = tl.where(wins, token, best), tl.where(wins, greatest, score)
    return best


@triton.jit
def settle_row(
    row,
    best,
    limits,
    requests,
    counts,
    masses,
    lists,
    scales,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the token of a non-greedy row, chosen from the `lists` of `sift`: values, weights and places.
    Write the row's greatest logit, the least value that can be chosen and the sum of exp of all that can be
    to `scales` [rows, 3], if given.
    """
    integers, numbers, num_rows = requests
    key, top_k, _, min_p_floor, top_p = read_row(integers, numbers, row, num_rows)
    values, weights, places = lists
    tiles = tl.arange(0, PADDED)
    lengths = tl.load(counts + row * TILES + tiles, mask=tiles < TILES, other=0)
    longest, count = tl.max(lengths, 0), tl.sum(lengths, 0)
    listed = (row * TILES + tiles) * TILE, lengths, longest, values, weights, places
    floor = min_p_floor
    if top_k > 0:
        floor = tl.maximum(floor, _floor(top_k.to(tl.float64), floor, count, listed, False, PADDED, WIDTH))
    if top_p < 1:
        if top_k > 0:
            below = at_order(tl.maximum(order(floor) - 1, LEAST))
            count, mass = _above(below, listed, True, PADDED, WIDTH)
        else:
            mass = _mass(masses, row, TILES, PADDED)
        floor = _floor(top_p * mass * _EXACTLY, floor, count, listed, True, PADDED, WIDTH)
    if scales is not None:
        if (top_k > 0) | (top_p < 1):
            floor = _least(floor, listed, PADDED, WIDTH)
            # 0, the greatest value, is not above -0, the next lower value in order.
            below = at_order(tl.maximum(tl.minimum(order(floor) - 1, -2), LEAST))
            count, total = _above(below, listed, True, PADDED, WIDTH)
        else:
            total = _mass(masses, row, TILES, PADDED)
        tl.store(scales + row * 3, tl.load(limits + row * 3))
        tl.store(scales + row * 3 + 1, floor)
        tl.store(scales + row * 3 + 2, total / UNIT)
    return _race(key, best, tl.load(limits + row * 3 + 2), floor, listed, TILE, PADDED, WIDTH)


@triton.jit
def share_of(target, row, tokens, inside):
    """Return the float32 probabilities of a row's `tokens`, one or a block, from the scales of `settle_row`;
    zeros if no token has a finite score. `target` is the tuple of `Chosen`'s tokens, logits, numbers, scales
    and logits stride.
    """
    chosen, logits, numbers, scales, stride = target
    best = tl.load(chosen + row)
    temperature = tl.load(numbers + row).to(tl.float32)
    share = ((tokens == best) & (best >= 0)).to(tl.float32)
    if (best >= 0) & (temperature > 0):
        top = tl.load(scales + row * 3).to(tl.float32)
        floor = tl.maximum(tl.load(scales + row * 3 + 1).to(tl.float32), -SPAN)
        total = tl.load(scales + row * 3 + 2)
        value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value - top, temperature)
        share = tl.where(value >= floor, tl.exp(value), 0.0) * (1.0 / total).to(tl.float32)
    return share


@triton.jit
def weigh(chosen, logits, numbers, scales, shares, stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid: (tiles, rows). Write the tokens' probabilities to `shares`, float32 [rows, SIZE]."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    share = share_of((chosen, logits, numbers, scales, stride), row, tokens, inside)
    tl.store(shares + row * SIZE + tokens, share, mask=inside)
