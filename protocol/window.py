"""Finds the blocks of a sequence that are still read when all layers attend within a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 64
"""Tokens in a tile: kernels read keys in whole tiles, also some before the window."""


@dataclass(frozen=True)
class Window:
    """A sliding window of `size` tokens, the row's own among them."""

    size: int
    block_size: int

    def first_place(self, position: int) -> int:
        """Return the place of the first block that rows from this position on read."""
        return max(position + 1 - self.size, 0) // TILE * TILE // self.block_size

    def span(self, num_rows: int = 0) -> int:
        """Return the tokens read from the window's start, plus `num_rows`, rounded up to whole blocks."""
        return (-(-(self.size + TILE + num_rows) // self.block_size) + 1) * self.block_size
