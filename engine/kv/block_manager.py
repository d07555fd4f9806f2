"""The blocks of a KV pool, in its block pools and the tiers below: how many there are, and which can be
found.

Full blocks of committed tokens are found again by their chained identity (`protocol.ids`), as in vLLM's
automatic prefix caching. What is evicted may go to lower tiers. Who has which blocks is in
`engine.kv.sequence_blocks`.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.kv.cache_events import CacheEvent, CacheLog
from engine.kv.pool import KVPool
from engine.kv.tiers.host import HostTier
from protocol.ids import BlockIdentity, table_identity
from protocol.kv_events import Medium
from protocol.window import Window


@dataclass(frozen=True, eq=False)
class Table:
    """Where a sequence's blocks of some of the layers lie. Behind a `window`, if these attend within one, it
    has none. `number` tells it from others of the same block_pool.
    """

    index: int
    """Of the block_pool."""
    block_pool: BlockPool
    tier: HostTier | None
    window: Window | None
    number: int

    def has(self, identity: BlockIdentity) -> bool:
        return self.block_pool.find(identity, self.number) is not None

    def has_below(self, identity: BlockIdentity) -> bool:
        return self.tier is not None and self.tier.holds(table_identity(identity, self.number))

    def below(self, identities: Sequence[BlockIdentity]) -> list[BlockIdentity]:
        """As the tier knows them."""
        return [table_identity(identity, self.number) for identity in identities]

    def first_place(self, position: int) -> int:
        """Of the blocks that rows from this position on read."""
        return self.window.first_place(position) if self.window is not None else 0


class BlockManager:
    """`tiers` are those below the pool's block pools, all or none. A sequence has a table in each block
    pool for each of the `windows`; None stands for layers that see all.
    """

    def __init__(
        self,
        pool: KVPool,
        enable_prefix_caching: bool = True,
        tiers: Sequence[HostTier] = (),
        windows: Sequence[Window | None] = (None,),
        most_rows: int = 0,
    ) -> None:
        self.pool = pool
        self.most_rows = most_rows
        """That a step computes of a sequence."""
        self.block_size = pool.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers
        self.least_blocks = 0
        """Of each block pool, that a sequence has from its first `grow` on, whatever its length."""
        below = [*itertools.zip_longest(pool.block_pools, tiers)]
        self.state_unit = pool.state_unit
        """States are kept behind multiples of so many tokens; 0 where there are none."""
        self.block_pools = [
            BlockPool(len(blocks), tier, pool.state_blocks, len(windows)) for blocks, tier in below
        ]
        self.tables = [
            Table(index, block_pool, tier, window, number)
            for index, (block_pool, (_, tier)) in enumerate(zip(self.block_pools, below, strict=True))
            for number, window in enumerate(windows)
        ]
        self.has_windows = any(window is not None for window in windows)
        self.log: CacheLog | None = None

    def watch(self) -> CacheLog:
        """A log that begins with all that the prefix cache holds, and gets every change from now on."""
        self.log = CacheLog(self.contents())
        for block_pool in self.block_pools:
            block_pool.log = self.log
        for tier in self.tiers if self._tells_of_tiers else ():
            tier.watch(self.log)
        return self.log

    def contents(self) -> list[CacheEvent]:
        """The events that lead from nothing known to what the prefix cache holds."""
        everywhere = functools.reduce(
            operator.and_, (block_pool.published() for block_pool in self.block_pools)
        )
        stored = [(Medium.GPU, identity) for identity in everywhere]
        if self._tells_of_tiers:
            stored.extend(itertools.chain.from_iterable(tier.contents() for tier in self.tiers))
        return [CacheEvent("cleared"), *(CacheEvent("stored", *block) for block in stored)]

    @property
    def num_blocks(self) -> int:
        """Of all block pools; so are the other counts."""
        return sum(block_pool.num_blocks for block_pool in self.block_pools)

    @property
    def num_free(self) -> int:
        return sum(block_pool.num_free for block_pool in self.block_pools)

    @property
    def num_cached(self) -> int:
        return sum(block_pool.num_cached for block_pool in self.block_pools)

    @property
    def available(self) -> tuple[int, ...]:
        """Blocks of each block pool that could be handed out now."""
        return tuple(block_pool.num_available for block_pool in self.block_pools)

    @property
    def _tells_of_tiers(self) -> bool:
        """Whether what lies there counts by itself."""
        return not self.state_unit and len(self.tables) == len(self.block_pools)
