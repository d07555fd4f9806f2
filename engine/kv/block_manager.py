"""The pool's blocks with the stores over them, and what the prefix cache holds.

Full blocks of committed tokens are found again by their chained identity (`protocol.ids`), as in vLLM's
automatic prefix caching. `engine.kv.sequence_blocks` holds the blocks of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.kv.cache_events import CacheEvent, CacheLog
from engine.kv.stores import BlockPool, StateStore, Store
from engine.kv.tiers.host import HostTier
from protocol.kv_events import Medium, Window


class BlockMemory(Protocol):
    """The memory behind the blocks (`KVPool`). Without a model anything with these members will do."""

    block_size: int
    num_blocks: int
    state_blocks: int
    """Blocks that hold a state of recurrent layers, 0 if there are none."""
    state_unit: int
    """States are kept after multiples of so many tokens."""

    def copy_block(self, source: int, target: int) -> None: ...

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None: ...


class BlockManager(BlockPool):
    """A sequence has a block table for each of the `windows`; None stands for layers that see all. A step
    computes at most `most_rows` tokens of a sequence.
    """

    def __init__(
        self,
        pool: BlockMemory,
        enable_prefix_caching: bool = True,
        tier: HostTier | None = None,
        windows: Sequence[Window | None] = (None,),
        most_rows: int = 0,
    ) -> None:
        super().__init__(pool.num_blocks, tier)
        self.pool = pool
        self.block_size = size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.most_rows = most_rows
        self.least_tokens = 0
        """A sequence has room for so many tokens from its first blocks on, whatever its length."""
        self.tables = [Store(self, size, number, window) for number, window in enumerate(windows)]
        self.states = (
            StateStore(self, size, pool.state_blocks, pool.state_unit) if pool.state_blocks else None
        )
        self.stores: list[Store] = [*self.tables, *([self.states] if self.states is not None else [])]
        self.has_windows = any(window is not None for window in windows)
        self._told = self.states or self.tables[0]
        """The store whose entries tell how long a prefix may be found: where there are states, up to one."""

    def watch(self) -> CacheLog:
        """A log that begins with all that the prefix cache holds, and gets every change from now on."""
        self._told.log = log = CacheLog(self.contents())
        if self.tier is not None and len(self.stores) == 1:
            self.tier.watch(log)
        return log

    def contents(self) -> list[CacheEvent]:
        """The events that lead from nothing known to what the prefix cache holds."""
        stored = [(Medium.GPU, identity) for identity in self._told.entries]
        if self.tier is not None and len(self.stores) == 1:  # else a block there is of no use by itself
            stored.extend(self.tier.contents())
        return [CacheEvent("cleared"), *(CacheEvent("stored", *block) for block in stored)]
