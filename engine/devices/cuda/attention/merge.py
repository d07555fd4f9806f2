"""Adds up the parts that `attend` has left of rows with several splits."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.plan import keys_of
from engine.devices.cuda.attention.softmax import fade, share


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "tile_tokens", "window"])
def merge(
    parts,
    masses,
    sinks,
    out,
    tile_sequence,
    tile_row,
    query_start,
    context_len,
    slots,
    first_key,
    tree_start,
    first_tile,
    num_tiles,
    tile_tokens,
    window,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Programs: row of a tile, head. Splits are added TOGETHER by their numbers from key 0 on, so in the same
    order wherever a window begins.
    """
    tile, token, head = tl.program_id(0) // tile_tokens, tl.program_id(0) % tile_tokens, tl.program_id(1)
    sequence = tl.load(tile_sequence + first_tile + tile)
    if sequence < 0:
        return
    first_row = tl.load(tile_row + first_tile + tile)
    end_row, _, _, low, high = keys_of(
        sequence, first_row, query_start, context_len, first_key, tree_start, window, TOKENS, WINDOWED
    )
    row = first_row + token
    begin, stop = low // SPLIT, tl.cdiv(high, SPLIT)
    if row >= end_row or stop - begin < 2:
        return
    if tl.load(slots + row) < 0:
        return
    d = tl.arange(0, VALUE_PADDED)
    top, mass = float("-inf"), 0.0
    total = tl.zeros([VALUE_PADDED], tl.float32)
    for start in range(begin // TOGETHER * TOGETHER, stop, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        inside = (split >= begin) & (split < stop)
        kept = (((split - begin).to(tl.int64) * num_tiles + tile) * tile_tokens + token) * HEADS + head
        weight = tl.load(masses + kept, mask=inside, other=float("-inf"))
        part = tl.load(
            parts + kept[:, None] * VALUE_DIM + d[None, :],
            mask=inside[:, None] & (d < VALUE_DIM)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(weight, 0))
        faded, offset = fade(top, new)
        weight = tl.exp2(weight - offset)
        mass = mass * faded + tl.sum(weight, 0)
        total = total * faded + tl.sum(part * weight[:, None], 0)
        top = new
    result = total / mass
    if sinks is not None:
        result = result * share(top, mass, tl.load(sinks + head).to(tl.float32))
    place = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
    tl.store(out + place + d, result.to(out.dtype.element_ty), mask=d < VALUE_DIM)
