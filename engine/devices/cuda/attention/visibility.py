"""The keys that a query row sees: those between two places and, in a tree, those whose bits are set."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def popcount(bits):
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def highest_bits(bits, count):
    """Return the `count` highest set bits of uint64, at least one."""
    below = tl.zeros(bits.shape, tl.uint64)  # binary search for the number of low bits to clear
    for power in tl.static_range(5, -1, -1):
        many = popcount(bits >> (below + ((1 << power) - 1))) > count
        below += many.to(tl.uint64) << power
    return (bits >> below) << below


@triton.jit
def visible_keys(row, live, place, first_key, visible, tree_start, sequence, window, WINDOWED: tl.constexpr):
    """Return the keys that a row sees: [first, end), and key `fork` + i if bit i of `path` is set."""
    position, end, fork = place, place + 1, 0
    path = tl.zeros(row.shape, tl.uint64)
    if visible is not None:
        start = tl.load(tree_start + sequence)
        if start >= 0:
            fork = start
            path = tl.load(visible + row, mask=live, other=1).to(tl.uint64, bitcast=True)
            position = fork + popcount(path) - 1
            end = tl.full(row.shape, 0, tl.int32) + fork
            if WINDOWED:
                path = highest_bits(path, window)
    first = tl.full(row.shape, 0, tl.int32) + first_key
    if WINDOWED:
        first = tl.maximum(first, position - window + 1)
    return first, end, fork, path


@triton.jit
def is_visible(key, first, end, fork, path, TREES: tl.constexpr):
    """Return whether each row sees each key: bool [rows, keys]."""
    seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
    if TREES:
        bit = tl.minimum(tl.maximum(key - fork, 0), 63).to(tl.uint64)
        on_path = ((path[:, None] >> bit[None, :]) & 1) != 0
        seen = seen | (on_path & (key >= fork)[None, :])
    return seen
