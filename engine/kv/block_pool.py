"""The blocks of one block pool of the KV pool: reference counts, prefix cache, eviction.

Pure bookkeeping over block numbers. A block is used (somebody refers to it), cached (nobody does, but its
content can be found by identity) or free. A *published* block, used or cached, is one that can be found; it
is never written again. What is evicted may go to a lower tier.

Where a sequence has several block tables, the block pool has blocks of all of them, each found by its
table and its tokens' identity. Whoever keeps track of the cache is told of those of the first table alone.

A state of recurrent layers takes several blocks. It is found by the identity of the block of tokens behind
which it is, and comes and goes as one. Where states are kept, a prefix is of use up to one of them alone: so
these are logged, and blocks of tokens are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView
from dataclasses import dataclass

from engine.kv.cache_events import CacheLog
from engine.kv.tiers.host import Evicted, HostTier
from protocol.errors import TandemError
from protocol.ids import BlockIdentity, state_identities, table_identity
from protocol.kv_events import Medium


class OutOfBlocksError(TandemError):
    """More blocks are wanted than are free or evictable."""


@dataclass
class KeptState:
    blocks: list[int]
    num_users: int
    """Sequences that went on from it; where two prompts part, these two to begin with."""


class BlockPool:
    def __init__(
        self, num_blocks: int, lower: HostTier | None = None, state_blocks: int = 0, num_tables: int = 1
    ) -> None:
        """A state takes `state_blocks`, 0 where there are none."""
        self.num_blocks = num_blocks
        self.lower = lower
        self.state_blocks = state_blocks
        self.log: CacheLog | None = None
        self.drafted = [False] * num_blocks
        """Of each block: whether all of its places hold draft KV too."""
        self._references = [0] * num_blocks
        self._identity_of: list[BlockIdentity | None] = [None] * num_blocks
        self._table_of = [0] * num_blocks
        """Of those that can be found."""
        self._block_of: list[dict[BlockIdentity, int]] = [{} for _ in range(num_tables)]
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._states: dict[BlockIdentity, KeptState] = {}
        self.num_states_saved = self.num_states_evicted = 0
        self._state_in: dict[int, BlockIdentity] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that the prefix cache keeps until their room is needed."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out now: free or evictable."""
        return len(self._free) + len(self._evictable)

    def find(self, identity: BlockIdentity, table: int = 0) -> int | None:
        return self._block_of[table].get(identity)

    def published(self) -> KeysView[BlockIdentity]:
        """The identities of all blocks that can be found; where states are kept, of those behind which one
        is.
        """
        return self._states.keys() if self.state_blocks else self._block_of[0].keys()

    def num_references(self, block: int) -> int:
        return self._references[block]

    def is_locked(self, block: int) -> bool:
        """Whether it must not be written in place, by whom it may be: it is shared or published."""
        return self._references[block] > 1 or self._identity_of[block] is not None

    def take(self, count: int) -> list[int]:
        """`count` blocks, each referenced once, in ascending order: adjacent ones make one transfer.

        Only if so many are available.
        """
        evicted: list[Evicted] = []
        while len(self._free) < count:
            self._evict(evicted)
        if evicted and self.lower is not None:
            self.lower.save(evicted)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            self.drafted[block] = False
        return sorted(taken)

    def publish(self, identity: BlockIdentity, block: int, table: int = 0) -> bool:
        """It can be found from now on, unless an equal one can; whether that is new."""
        if identity in self._block_of[table] or self._identity_of[block] is not None:
            return False
        self._block_of[table][identity] = block
        self._identity_of[block] = identity
        self._table_of[block] = table
        return True

    def reference(self, block: int) -> None:
        """Of one that can be found."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def dereference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._identity_of[block] is None and block not in self._state_in:
                self._free.append(block)
            else:
                self._evictable[block] = None

    # --- states -------------------------------------------------------------------------------------

    @property
    def num_states(self) -> int:
        return len(self._states)

    def find_state(self, identity: BlockIdentity) -> KeptState | None:
        """The state behind this block."""
        return self._states.get(identity)

    def publish_state(self, identity: BlockIdentity, blocks: list[int], *, at_junction: bool = False) -> bool:
        """The caller's `blocks` hold it; it can be found from now on, unless an equal one can; whether that
        is new.
        """
        if identity in self._states:
            return False
        self._states[identity] = KeptState(list(blocks), 2 if at_junction else 0)
        self.num_states_saved += 1
        self._state_in.update(dict.fromkeys(blocks, identity))
        return True

    def use_state(self, identity: BlockIdentity) -> list[int]:
        """Its blocks, for a sequence that goes on from it: they are evicted late."""
        state = self._states[identity]
        state.num_users += 1
        for block in state.blocks:
            if block in self._evictable:
                self._evictable.move_to_end(block)
        return list(state.blocks)

    def age_state(self, identity: BlockIdentity) -> None:
        """There is one further on: it is evicted first, unless several went on from it."""
        state = self._states.get(identity)
        for block in state.blocks if state is not None and state.num_users <= 1 else ():
            if block in self._evictable:
                self._evictable.move_to_end(block, last=False)

    # --- inside -------------------------------------------------------------------------------------

    def _evict(self, evicted: list[Evicted]) -> None:
        """The least recently used block, or state, is free from now on."""
        block, _ = self._evictable.popitem(last=False)
        if block in self._state_in:
            self._evict_state(self._state_in[block], evicted)
            return
        identity = self._identity_of[block]
        assert identity is not None
        table = self._table_of[block]
        del self._block_of[table][identity]
        self._identity_of[block] = None
        self._free.append(block)
        evicted.append(Evicted(table_identity(identity, table), block))
        if self.log is not None and not self.state_blocks and table == 0:
            self.log.removed(Medium.GPU, identity)

    def _evict_state(self, identity: BlockIdentity, evicted: list[Evicted]) -> None:
        blocks = self._states.pop(identity).blocks
        self.num_states_evicted += 1
        for part, block in zip(state_identities(identity, len(blocks)), blocks, strict=True):
            del self._state_in[block]
            self._evictable.pop(block, None)
            self._free.append(block)
            evicted.append(Evicted(part, block))
        if self.log is not None:
            self.log.removed(Medium.GPU, identity)
