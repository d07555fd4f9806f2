"""Which of a sequence's blocks are still read where all layers attend within a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 64
"""Kernels read keys in tiles of so many. Those before the window weigh nothing, but must be numbers."""


@dataclass(frozen=True)
class Window:
    """Of `size` tokens, the row's own among them."""

    size: int
    block_size: int

    def first_place(self, position: int) -> int:
        """The place of the first block that rows from this position on read."""
        return max(position + 1 - self.size, 0) // TILE * TILE // self.block_size

    def span(self, num_rows: int = 0) -> int:
        """Tokens that are read behind a position at most, and so many behind it; in whole blocks."""
        return (-(-(self.size + TILE + num_rows) // self.block_size) + 1) * self.block_size
