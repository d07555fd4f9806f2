"""The tiles of a step (query rows of one sequence, computed together) and the splits of their keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_sequences", "num_tiles", "shortest", "longest", "window", "most_full"])
def plan(
    query_start,
    context_len,
    first_key,
    tree_start,
    tile_sequence,
    tile_row,
    full_start,
    num_sequences,
    num_tiles,
    shortest,
    longest,
    window,
    most_full,
    ROWS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Write each tile's sequence and first row, for sequences with `shortest` to `longest` rows cut at every
    ROWS; unused tiles get sequence -1. Tile t has the full splits full_start[t] to full_start[t + 1]: all but
    its last one, or none if the total would exceed `most_full`. SEQUENCES is num_sequences rounded up to a
    power of two.
    """
    sequence = tl.arange(0, SEQUENCES)
    start = tl.load(query_start + tl.minimum(sequence, num_sequences))
    rows = tl.load(query_start + tl.minimum(sequence + 1, num_sequences)) - start
    tiles = tl.where((rows >= shortest) & (rows <= longest), tl.cdiv(rows, ROWS), 0)
    end = tl.cumsum(tiles, 0)
    listed = 0
    tl.store(full_start, listed)
    for first_tile in range(0, num_tiles, TILES):
        tile = first_tile + tl.arange(0, TILES)
        before = end[None, :] <= tile[:, None]
        owner = tl.sum(before.to(tl.int32), 1)
        earlier = tl.sum(tl.where(before, tiles[None, :], 0), 1)
        taken = (tile < num_tiles) & (owner < num_sequences)
        owner = tl.where(taken, owner, 0)
        first = tl.load(query_start + owner) + (tile - earlier) * ROWS
        tl.store(tile_sequence + tile, tl.where(taken, owner, -1), mask=tile < num_tiles)
        tl.store(tile_row + tile, first, mask=tile < num_tiles)
        _, _, _, low, high = keys_of(
            owner, first, query_start, context_len, first_key, tree_start, window, ROWS, WINDOWED
        )
        full = tl.where(taken, tl.cdiv(high, SPLIT) - low // SPLIT - 1, 0)
        through = listed + tl.cumsum(full, 0)
        listed = tl.max(tl.where(through <= most_full, through, listed), 0)
        tl.store(full_start + 1 + tile, tl.minimum(through, listed), mask=tile < num_tiles)


@triton.jit
def owner_of(item, full_start, num_tiles):
    """Return the tile of full split `item`, by binary search."""
    tile, beyond = 0, num_tiles
    while beyond - tile > 1:
        middle = (tile + beyond) // 2
        is_before = tl.load(full_start + middle) <= item
        tile = tl.where(is_before, middle, tile)
        beyond = tl.where(is_before, beyond, middle)
    return tile


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
    """Return for a tile: the end row of its sequence (exclusive), the place that row 0 would have in the
    sequence, the sequence's first visible key, and the keys [low, high) that the tile's rows may see.
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
