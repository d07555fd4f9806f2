"""The kernel that joins the partial results of `attend` for rows with several splits."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.softmax import join, share


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
