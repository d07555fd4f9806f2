"""The tiles of a step: which query rows are computed together. A tile has rows of one sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_sequences", "num_tiles", "shortest", "longest"])
def plan(
    query_start,
    tile_sequence,
    tile_row,
    num_sequences,
    num_tiles,
    shortest,
    longest,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Each tile's sequence and first row, of sequences with `shortest` to `longest` rows, cut at every ROWS.
    The tiles left over have sequence -1. SEQUENCES is num_sequences rounded up to a power of two.
    """
    sequence = tl.arange(0, SEQUENCES)
    start = tl.load(query_start + tl.minimum(sequence, num_sequences))
    rows = tl.load(query_start + tl.minimum(sequence + 1, num_sequences)) - start
    tiles = tl.where((rows >= shortest) & (rows <= longest), tl.cdiv(rows, ROWS), 0)
    end = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = end[None, :] <= tile[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    earlier = tl.sum(tl.where(before, tiles[None, :], 0), 1)
    taken = (tile < num_tiles) & (owner < num_sequences)
    first = tl.load(query_start + owner, mask=taken, other=0) + (tile - earlier) * ROWS
    tl.store(tile_sequence + tile, tl.where(taken, owner, -1), mask=tile < num_tiles)
    tl.store(tile_row + tile, first, mask=tile < num_tiles)


@triton.jit
def keys_of(
    sequence,
    first_row,
    query_start,
    context_len,
    first_key,
    tree_start,
    window,
    ROWS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return for a tile: the row after its sequence's last, the place that row 0 would have in the sequence,
    the first key of the sequence that may be seen, and the keys [low, high) that the tile's rows may see.
    """
    end_row = tl.load(query_start + sequence + 1)
    origin = tl.load(context_len + sequence) - end_row
    first = 0
    if first_key is not None:
        first = tl.load(first_key + sequence)
    low = first
    if WINDOWED:
        oldest = origin + first_row
        if tree_start is not None:
            start = tl.load(tree_start + sequence)
            oldest = tl.where(start >= 0, tl.minimum(oldest, start), oldest)
        low = tl.maximum(first, oldest - window + 1)
    high = origin + tl.minimum(first_row + ROWS, end_row)
    return end_row, origin, first, low, high
