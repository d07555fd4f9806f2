"""A pool and lower tiers without bytes, for a block manager. They record their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.kv.cache_events import CacheLog
from engine.kv.tiers.host import Evicted
from protocol.kv_events import Medium


class FakePool:
    def __init__(self, block_size: int, num_blocks: int, state_blocks: int = 0, state_unit: int = 0) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.state_blocks, self.state_unit = state_blocks, state_unit
        self.copies: list[tuple[int, int]] = []
        """(source, target)."""
        self.moves: list[tuple[list[list[int]], int, list[int]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> FakePool:
        return FakePool(self.block_size, self.num_blocks, self.state_blocks, self.state_unit)

    def copy_block(self, source: int, target: int) -> None:
        self.copies.append((source, target))

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None:
        self.moves.append(([list(table) for table in tables], first, list(places)))


class ListMemory:
    """Host memory whose bytes are lists, one for each block of a pool."""

    block_bytes = 1

    def __init__(self, content: list[list[Any]], num_slots: int) -> None:
        self.num_slots = num_slots
        self.content = content
        self.slots: list[list[Any]] = [[] for _ in range(num_slots)]

    def __deepcopy__(self, memo: dict[int, object]) -> ListMemory:
        return self  # a manager's copies only look entries up

    def save(self, block: int, slot: int) -> None:
        self.slots[slot] = list(self.content[block])

    def load(self, slot: int, block: int) -> None:
        self.content[block] = list(self.slots[slot])


class FakeTier:
    """Holds blocks by these names, and loses the last `lost` blocks of its first load."""

    def __init__(self, names: Sequence[bytes], lost: int = 0) -> None:
        self.names, self.lost = [*names], lost
        self.loaded: list[int] = []
        self.asked: list[bytes] = []
        self.num_missed = 0

    def holds(self, name: bytes) -> bool:
        return name in self.names

    knows = holds

    def touch(self, names: Sequence[bytes]) -> None: ...

    def watch(self, log: CacheLog) -> None: ...

    def save(self, evicted: Sequence[Evicted]) -> None: ...

    def contents(self) -> list[tuple[Medium, bytes]]:
        return [(Medium.CPU, name) for name in self.names]

    def load(self, names: Sequence[bytes], block_ids: Sequence[int]) -> int:
        count = max(len(names) - self.lost, 0)
        self.lost = 0 if names else self.lost
        self.names = [name for name in self.names if name not in names[count:]]
        self.asked += names
        self.loaded += block_ids[:count]
        return count

    def count_misses(self, num_blocks: int) -> None:
        self.num_missed += num_blocks
