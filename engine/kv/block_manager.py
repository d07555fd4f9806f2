"""The KV pool's blocks, the stores that share them, and the contents of the prefix cache.

Bookkeeping only, without memory. A block is used (referenced), cached (unreferenced, but part of an entry) or
free. Full blocks of committed tokens are found again by their chained identity (`protocol.ids`), as in vLLM's
automatic prefix caching. Stores differ in their entries and in how far rows see. Attention layers keep a
block for each `block_size` tokens and see all tokens or a window (vLLM's FullAttentionSpec and
SlidingWindowSpec). Recurrent layers keep the state after a token in several blocks (MambaSpec). A draft
model's KV is in the blocks of the first store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv.cache_events import CacheEvent, CacheLog
from engine.kv.tiers.host import Evicted, HostTier
from protocol.ids import BlockIdentity, state_identities, table_identity
from protocol.kv_events import Medium, Window

Holds = Callable[[BlockIdentity], bool]
"""A function that returns whether a lower tier has a block of this name."""
Span = tuple[int, int]
"""The first place that rows read, and the end (exclusive) of the places whose entries are in the pool."""


@dataclass(slots=True, eq=False)
class CacheEntry:
    """Blocks of a store that are found and evicted together, and never written again."""

    store: Store
    identity: BlockIdentity
    blocks: Sequence[int]
    num_users: int = 0
    """Number of sequences that continued from the entry."""


class BlockPool:
    """Reference counts of blocks, and their eviction to the lower `tier`, if any."""

    def __init__(self, num_blocks: int, tier: HostTier | None = None) -> None:
        self.num_blocks = num_blocks
        self.tier = tier
        self.drafted = [False] * num_blocks
        """Whether all places of a block also hold draft KV, for each block."""
        self._references = [0] * num_blocks
        self._entry_of: list[CacheEntry | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Number of blocks that are neither referenced nor cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks that the prefix cache keeps until their room is needed."""
        return len(self._evictable)

    @property
    def available(self) -> int:
        """Number of blocks that `take` could return now."""
        return len(self._free) + len(self._evictable)

    def num_references(self, block: int) -> int:
        return self._references[block]

    def is_locked(self, block: int) -> bool:
        """Return whether the block's holder must not write to it: it is shared or belongs to an entry."""
        return self._references[block] > 1 or self._entry_of[block] is not None

    def take(self, count: int) -> list[int]:
        """Return `count` blocks, which must be available, each referenced once. They are in ascending order,
        since adjacent blocks make one transfer.
        """
        evicted: list[Evicted] = []
        while len(self._free) < count:
            evicted += self._evict()
        if evicted and self.tier is not None:
            self.tier.save(evicted)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            self.drafted[block] = False
        return sorted(taken)

    def cache(self, entry: CacheEntry) -> bool:
        """Assign the blocks to `entry`, unless one of them has an entry; return whether it was done."""
        for block in entry.blocks:
            if self._entry_of[block] is not None:
                return False
        for block in entry.blocks:
            self._entry_of[block] = entry
        return True

    def reference(self, entry: CacheEntry) -> Sequence[int]:
        """Add a reference to each block of an entry, and return the blocks."""
        entry.num_users += 1
        for block in entry.blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1
        return entry.blocks

    def dereference(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block. Blocks that become evictable are evicted in this order."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._entry_of[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def age(self, entry: CacheEntry) -> None:
        """Make an unreferenced entry the next to be evicted."""
        for block in entry.blocks:
            if block in self._evictable:
                self._evictable.move_to_end(block, last=False)

    def _evict(self) -> Iterable[Evicted]:
        """Free the least recently used block and the other blocks of its entry."""
        entry = self._entry_of[next(iter(self._evictable))]
        assert entry is not None
        for block in entry.blocks:
            del self._evictable[block]
            self._entry_of[block] = None
        self._free += entry.blocks
        entry.store.forget(entry)
        return map(Evicted, entry.store.names(entry.identity), entry.blocks)


class Store:
    """Entries with the KV of layers that see all tokens or a `window`; `number` is the block table."""

    def __init__(
        self, pool: BlockPool, block_size: int, number: int = 0, window: Window | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.number = number
        self.window = window
        self.sees_all = window is None
        self.log: CacheLog | None = None
        """The log of added and removed entries, if it is watched."""
        self.entries: dict[BlockIdentity, CacheEntry] = {}
        self.num_saved = self.num_evicted = 0

    def names(self, identity: BlockIdentity) -> list[BlockIdentity]:
        """Return the names of an entry's blocks in the lower tiers."""
        return [table_identity(identity, self.number)]

    def is_below(self, identity: BlockIdentity, holds: Holds | None) -> bool:
        return holds is not None and all(map(holds, self.names(identity)))

    def publish(self, identity: BlockIdentity, blocks: Sequence[int], num_users: int = 0) -> bool:
        """Make an entry of the blocks, unless `identity` has one; return whether the entry is new."""
        if identity in self.entries:
            return False
        entry = CacheEntry(self, identity, blocks, num_users)
        if not self.pool.cache(entry):
            return False
        self.entries[identity] = entry
        self.num_saved += 1
        return True

    def forget(self, entry: CacheEntry) -> None:
        del self.entries[entry.identity]
        self.num_evicted += 1
        if self.log is not None:
            self.log.removed(Medium.GPU, entry.identity)

    def first_place(self, position: int) -> int:
        """Return the first place that rows from this position on read; earlier blocks may be freed."""
        return self.window.first_place(position) if self.window is not None else 0

    def num_blocks(self, write_from: int, num_tokens: int, rows: int | None) -> int:
        """Return the number of blocks that a sequence of `num_tokens` tokens takes. With `rows`, a windowed
        table has room for the window and `rows` rows at a time, from `write_from` on.
        """
        if rows is not None and self.window is not None:
            num_tokens = min(num_tokens, write_from + self.window.span(rows))
        return -(-num_tokens // self.block_size)

    def span(
        self, known: Sequence[BlockIdentity], end: int, first: int, position: int, holds: Holds | None
    ) -> Span | None:
        """Return the places that rows from `position` on read in the first `end` blocks, which follow
        `first` others. Return None if one of these entries is neither in the pool nor in the lower tier.
        """
        start = here = max(self.first_place(position) - first, 0)
        while here < end and known[here] in self.entries:
            here += 1
        is_known = all(self.is_below(known[place], holds) for place in range(here, end))
        return (start, here) if is_known else None


class StateStore(Store):
    """Entries with states of recurrent layers; rows read one state. States are kept at multiples of `unit`
    tokens, and found by the identity of the block that ends there.
    """

    def __init__(self, pool: BlockPool, block_size: int, entry_blocks: int, unit: int) -> None:
        super().__init__(pool, block_size)
        self.sees_all = False
        self.entry_blocks = entry_blocks
        self.unit = unit

    def names(self, identity: BlockIdentity) -> list[BlockIdentity]:
        return state_identities(identity, self.entry_blocks)

    def span(
        self, known: Sequence[BlockIdentity], end: int, first: int, position: int, holds: Holds | None
    ) -> Span | None:
        if (first + end) * self.block_size > position:
            return None
        if known[end - 1] in self.entries:
            return end - 1, end
        return (end - 1, end - 1) if self.is_below(known[end - 1], holds) else None

    def age(self, identity: BlockIdentity) -> None:
        """Make a state that a later one replaces the next to be evicted, unless several sequences used it."""
        entry = self.entries.get(identity)
        if entry is not None and entry.num_users <= 1:
            self.pool.age(entry)


class BlockMemory(Protocol):
    """The memory of the blocks (`KVPool`). Code without a model may use any object with these members."""

    block_size: int
    num_blocks: int
    state_blocks: int
    """Number of blocks that hold a recurrent state; 0 without recurrent layers."""
    state_unit: int
    """Number of tokens at whose multiples states are kept."""

    def copy_block(self, source: int, target: int) -> None: ...

    def move_tokens(self, tables: Sequence[Sequence[int]], first: int, places: Sequence[int]) -> None: ...


class BlockManager(BlockPool):
    """The pool's blocks in stores. A sequence has a block table for each of the `windows`, where None stands
    for layers that see all tokens. A step computes at most `most_rows` tokens of a sequence.
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
        """Least number of tokens that a sequence gets blocks for, whatever its length."""
        self.tables = [Store(self, size, number, window) for number, window in enumerate(windows)]
        self.states = (
            StateStore(self, size, pool.state_blocks, pool.state_unit) if pool.state_blocks else None
        )
        self.stores: list[Store] = [*self.tables, *([self.states] if self.states is not None else [])]
        self.has_windows = any(window is not None for window in windows)
        self._logged_store = self.states or self.tables[0]
        """The store whose entries are logged: with recurrent layers, a usable prefix ends at a state."""

    def watch(self) -> CacheLog:
        """Return a log that begins with the prefix cache's contents and gets every change from now on."""
        self._logged_store.log = log = CacheLog(self.contents())
        if self.tier is not None and len(self.stores) == 1:
            self.tier.watch(log)
        return log

    def contents(self) -> list[CacheEvent]:
        """Return events that rebuild the contents of the prefix cache from nothing."""
        stored = [(Medium.GPU, identity) for identity in self._logged_store.entries]
        if self.tier is not None and len(self.stores) == 1:  # otherwise a block there is useless alone
            stored.extend(self.tier.contents())
        return [CacheEvent("cleared"), *(CacheEvent("stored", *block) for block in stored)]
