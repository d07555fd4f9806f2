"""A sequence's part of one store: a block table, or a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockMemory, StateStore, Store
from protocol.ids import BlockIdentity

NO_BLOCK = 0
"""Block id at places that no row reads; kernels need a valid id there."""


@dataclass(eq=False)
class Table:
    """A sequence's blocks in one block table. The first `num_left` places, before the window, have none.

    When the prefix was looked up, the store had blocks up to place `num_found`. The tokens that the sequence
    began with take `num_wanted` blocks.
    """

    store: Store
    blocks: list[int] = field(default_factory=list)
    num_left: int = 0
    num_found: int = 0
    num_wanted: int = 0

    def take_up(self, identities: Sequence[BlockIdentity], first: int, last: int) -> None:
        self.num_left, self.num_found = first, last
        self.blocks += [NO_BLOCK] * first
        for identity in identities[first:last]:
            self.blocks += self.store.pool.reference(self.store.entries[identity])

    def take(self, locked: Sequence[int], missing: int, memory: BlockMemory) -> None:
        """Take `missing` more blocks, and replace the blocks at the `locked` places by copies."""
        pool = self.store.pool
        taken = pool.take(len(locked) + missing)
        sources = [self.blocks[place] for place in locked]
        for place, source, target in zip(locked, sources, taken, strict=False):
            memory.copy_block(source, target)
            pool.drafted[target] = pool.drafted[source]
            self.blocks[place] = target
        self.blocks += taken[len(locked) :]
        pool.dereference(reversed(sources))

    def share(self, place: int, identity: BlockIdentity, *, prefers_known: bool) -> bool:
        """Publish the full block at this place; return whether its entry is new. If `prefers_known`, take an
        equal cached block in its place."""
        if place < self.num_left:
            return False
        store, block = self.store, self.blocks[place]
        is_new = store.publish(identity, [block])
        known = store.entries.get(identity)
        if prefers_known and known is not None and known.blocks[0] != block:
            self.blocks[place] = store.pool.reference(known)[0]
            store.pool.dereference([block])
        return is_new

    def leave(self, position: int) -> None:
        """Free the blocks that rows from `position` on do not read. While the table has fewer than
        `num_wanted` places, append as many blocks as were freed, so that no other sequence takes them.
        """
        pool, first = self.store.pool, self.store.first_place(position)
        if first <= self.num_left:
            return
        left = self.blocks[self.num_left : first]
        num_own = sum(pool.num_references(block) == 1 for block in left)
        pool.dereference(left)
        self.blocks[self.num_left : first] = [NO_BLOCK] * len(left)
        self.blocks += pool.take(max(min(num_own, self.num_wanted - len(self.blocks)), 0))
        self.num_left = first

    def skip(self, place: int, position: int) -> None:
        """Move the blocks from `place` on to the first place that rows at `position` read."""
        first = self.store.first_place(position)
        if first > place:
            self.store.pool.dereference(self.blocks[self.num_left : place])
            self.blocks[:place] = [NO_BLOCK] * first
            self.num_left = first

    def free(self) -> None:
        self.store.pool.dereference(reversed(self.blocks[self.num_left :]))
        self.blocks.clear()
        self.num_left = 0


@dataclass(eq=False)
class RecurrentState:
    """A recurrent state in `blocks`, or room for one, to continue from or to hand over."""

    store: StateStore
    blocks: list[int] = field(default_factory=list)
    position: int = 0
    """Number of tokens before the state that was found; 0 if no state was found."""
    is_below: bool = False
    """Whether the state was found in the lower tier only."""
    is_lost: bool = False
    """Whether the lower tier has lost the state since."""
    junctions: set[int] = field(default_factory=set)
    """Positions where other prompts diverge from the sequence's."""
    passed: list[BlockIdentity] = field(default_factory=list)
    """Kept states that the sequence continued from or passed."""

    def take_up(self, identities: Sequence[BlockIdentity], first: int, last: int) -> None:
        self.position = len(identities) * self.store.block_size
        self.is_below = first == last
        if not self.is_below:
            self.blocks += self.store.pool.reference(self.store.entries[identities[first]])
            self.passed.append(identities[first])

    @property
    def is_own(self) -> bool:
        """Whether no other sequence refers to the state in `blocks` or to the one that will be loaded."""
        references = self.store.pool.num_references
        return self.is_below or (bool(self.blocks) and all(references(block) == 1 for block in self.blocks))

    def age(self) -> None:
        """Evict the passed states first, since a later one will be kept soon."""
        for identity in self.passed:
            self.store.age(identity)

    def add(self) -> None:
        """Take room for a state; the blocks must be available."""
        self.blocks += self.store.pool.take(self.store.entry_blocks)

    def drop(self) -> None:
        self.store.pool.dereference(self.blocks)
        self.blocks.clear()
        self.is_below = self.is_lost = False
