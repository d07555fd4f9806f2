"""A pool without bytes for a block manager: it keeps what it is asked to copy and move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FakePool:
    """`num_blocks` of each block_pool."""

    def __init__(self, block_size: int, *num_blocks: int, state_blocks: int = 0, state_unit: int = 0) -> None:
        self.block_size = block_size
        self.state_blocks, self.state_unit = state_blocks, state_unit
        self.block_pools = [range(count) for count in num_blocks]
        self.copies: list[tuple[int, int, int]] = []
        """(block pool, source, target)."""
        self.moves: list[tuple[list[list[int]], int, list[int]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> FakePool:
        states = {"state_blocks": self.state_blocks, "state_unit": self.state_unit}
        return FakePool(self.block_size, *map(len, self.block_pools), **states)

    def copy_block(self, block_pool: int, source: int, target: int) -> None:
        self.copies.append((block_pool, source, target))

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None:
        self.moves.append(([list(table) for table in tables], first, list(places)))
