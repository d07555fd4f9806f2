"""The arithmetic of scores and sums in the kernels, and the kernel that joins the splits of rows. Logarithms
are to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    """Return tanh to a unit in float32's last place; near 0, where exponentials cancel, by a polynomial."""
    z = x * x
    near = -0.053786684 + z * (0.020805383 - z * 0.0059058662)
    near = x + x * z * (-0.33333299 + z * (0.13331959 + z * near))
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(z < 0.36, near, tl.where(x < 0, -far, far))


@triton.jit
def fade(top, new):
    """Return the factor that rescales sums from maximum `top` to maximum `new`, and the offset of new
    exponents. Both maxima may be minus infinity.
    """
    offset = tl.where(new == float("-inf"), 0.0, new)
    return tl.exp2(top - offset), offset


@triton.jit
def mean(total, mass, top):
    """Return the weighted means of the rows' sums, and the logarithms [M] of the sums of weights."""
    safe = tl.where(mass == 0.0, 1.0, mass)
    return total / safe[:, None], top + tl.log2(safe)


@triton.jit
def join(mass, top, weight):
    """Add a split, with the logarithm `weight` of its weight, to the splits before it. Return the factors of
    their sum and of the split's mean, the new mass and the new maximum.
    """
    new = tl.maximum(top, weight)
    faded, offset = fade(top, new)
    counted = tl.exp2(weight - offset)
    return faded, counted, mass * faded + counted, new


@triton.jit
def share(top, mass, sink):
    """Return the share of all weight that is not the sink's; `mass` is the rest at maximum `top`."""
    new = tl.maximum(top, sink * LOG2E)
    weight = mass * tl.exp2(top - new)
    return weight / (weight + tl.exp2(sink * LOG2E - new))


@triton.jit(do_not_specialize=["num_tiles", "tile_tokens", "slots"])
def merge(
    parts,
    masses,
    sinks,
    out,
    tile_sequence,
    tile_row,
    full_start,
    query_start,
    slots,
    num_tiles,
    tile_tokens,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Process one head of one row after the other until none are left. Partial results are loaded TOGETHER at
    a time and joined one by one.
    """
    d = tl.arange(0, VALUE_PADDED)
    num_full = tl.load(full_start + num_tiles)
    for work in range(tl.program_id(0), num_tiles * tile_tokens * HEADS, tl.num_programs(0)):
        tile, token, head = work // HEADS // tile_tokens, work // HEADS % tile_tokens, work % HEADS
        full, end = tl.load(full_start + tile), tl.load(full_start + tile + 1)
        row = tl.load(tile_row + tile) + token
        taken = end > full
        if taken:
            taken = row < tl.load(query_start + tl.load(tile_sequence + tile) + 1)
        if taken:
            taken = tl.load(slots + row) >= 0
        if taken:
            top, mass = float("-inf"), 0.0
            total = tl.zeros([VALUE_PADDED], tl.float32)
            for start in range(full, end + 1, TOGETHER):
                for split in tl.static_range(TOGETHER):
                    item = tl.where(start + split < end, start + split, num_full + tile).to(tl.int64)
                    inside = start + split <= end
                    kept = (item * tile_tokens + token) * HEADS + head
                    weight = tl.load(masses + kept, mask=inside, other=float("-inf"))
                    part = tl.load(parts + kept * VALUE_DIM + d, mask=inside & (d < VALUE_DIM), other=0.0)
                    faded, counted, mass, top = join(mass, top, weight)
                    total = total * faded + part * counted
            result = total / mass
            if sinks is not None:
                result = result * share(top, mass, tl.load(sinks + head).to(tl.float32))
            place = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
            tl.store(out + place + d, result.to(out.dtype.element_ty), mask=d < VALUE_DIM)
