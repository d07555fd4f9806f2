"""The blocks and tokens of a hand-off, in the form that other workers read."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block_manager import Store
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateLayout
from protocol.handoff import SegmentInfo


class HandoffLayout:
    """The layout of hand-offs from a pool with these `tables`; `state` is None without recurrent layers."""

    def __init__(self, pool: KVPool, tables: Sequence[Store], state: StateLayout | None) -> None:
        self._pool, self._tables, self._state = pool, tables, state

    @property
    def segments(self) -> list[SegmentInfo]:
        return [*self._pool.segments, *([self._state.segment()] if self._state is not None else [])]

    def firsts(self, num_tokens: int, covered: int) -> list[int]:
        """Return for each table the first block that a hand-off of `num_tokens` tokens brings. Tokens before
        `covered` or before a sliding window are not sent.
        """
        first = covered // self._pool.block_size
        return [max(table.first_place(num_tokens), first) for table in self._tables]

    def num_places(self, num_tokens: int) -> int:
        """Return the number of token places in the blocks of a hand-off, including the state's blocks."""
        if self._state is None:
            return num_tokens
        size = self._pool.block_size
        return (-(-num_tokens // size) + self._pool.state_blocks) * size

    def state_position(self, num_tokens: int) -> int:
        """Return the position up to which a hand-off of `num_tokens` tokens covers all layers."""
        return num_tokens if self._state is None else self._state.position(num_tokens)
