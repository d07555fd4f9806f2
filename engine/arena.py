"""The blocks of one arena of the KV pool: reference counts, prefix cache, eviction.

Pure bookkeeping over block numbers. A block is used (somebody refers to it), cached (nobody does, but its
content can be found by identity) or free. A *published* block, used or cached, is one that can be found; it
is never written again. What is evicted may go to a lower tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView

from engine.cache_events import CacheLog
from engine.tiers.host import Evicted, HostTier
from protocol.errors import TandemError
from protocol.ids import BlockIdentity
from protocol.kv_events import Medium


class OutOfBlocksError(TandemError):
    """More blocks are wanted than are free or evictable."""


class Arena:
    def __init__(self, num_blocks: int, lower: HostTier | None = None) -> None:
        self.num_blocks = num_blocks
        self.lower = lower
        self.log: CacheLog | None = None
        self.drafted = [False] * num_blocks
        """Of each block: whether all of its places hold draft KV too."""
        self._references = [0] * num_blocks
        self._identity_of: list[BlockIdentity | None] = [None] * num_blocks
        self._block_of: dict[BlockIdentity, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

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

    def find(self, identity: BlockIdentity) -> int | None:
        return self._block_of.get(identity)

    def published(self) -> KeysView[BlockIdentity]:
        """The identities of all blocks that can be found."""
        return self._block_of.keys()

    def is_locked(self, block: int) -> bool:
        """Whether it must not be written in place, by whom it may be: it is shared or published."""
        return self._references[block] > 1 or self._identity_of[block] is not None

    def take(self, count: int) -> list[int]:
        """`count` blocks, each referenced once, in ascending order: adjacent ones make one transfer.

        Only if so many are available.
        """
        from_free = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(from_free)]
        evicted = [self._evict() for _ in range(count - from_free)]
        if evicted and self.lower is not None:
            self.lower.save(evicted)
        taken.extend(block for _, block in evicted)
        for block in taken:
            self._references[block] = 1
            self.drafted[block] = False
        return sorted(taken)

    def publish(self, identity: BlockIdentity, block: int) -> bool:
        """It can be found from now on, unless an equal one can; whether that is new."""
        if identity in self._block_of or self._identity_of[block] is not None:
            return False
        self._block_of[identity] = block
        self._identity_of[block] = identity
        return True

    def reference(self, block: int) -> None:
        """Of one that can be found."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def dereference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._identity_of[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def _evict(self) -> Evicted:
        block, _ = self._evictable.popitem(last=False)
        identity = self._identity_of[block]
        assert identity is not None
        del self._block_of[identity]
        self._identity_of[block] = None
        if self.log is not None:
            self.log.removed(Medium.GPU, identity)
        return Evicted(identity, block)
