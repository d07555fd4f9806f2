"""Which block of the KV pool holds what: reference counts, prefix sharing, copy-on-write, LRU eviction.

Pure bookkeeping over block numbers; it never touches the pool's memory. Full blocks of committed tokens are
found again by their chained identity (`protocol.ids`), as in vLLM's automatic prefix caching. What is evicted
may go to a lower tier, from where a later sequence with the same prefix gets it back.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.tiers.interface import Evicted, LowerTier
from protocol.errors import TandemError
from protocol.ids import BlockIdentity, block_identities, child_identity


class OutOfBlocksError(TandemError):
    """More blocks are wanted than are free or evictable."""


class BlockCopy(NamedTuple):
    """The whole block `source` is to be copied over `target` before either is written."""

    source: int
    target: int


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence, in order.

    `identities` are those of the leading full blocks whose tokens are committed; it may lag behind
    `block_ids`. `below` are the next ones, as far as they were found in the lower tier. Only a `BlockManager`
    changes a table; blocks that are not `shareable` are never published.
    """

    root: BlockIdentity
    block_ids: list[int] = field(default_factory=list)
    identities: list[BlockIdentity] = field(default_factory=list)
    below: list[BlockIdentity] = field(default_factory=list)
    shareable: bool = True


class BlockManager:
    """Hands out the blocks of a pool of `num_blocks` blocks of `block_size` tokens.

    A block is used (some table references it), cached (no table does, but its content can be found by
    identity) or free. A *published* block, used or cached, is one that the prefix cache knows; it is never
    written again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        lower: LowerTier | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be positive, got {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._lower = lower
        self._references = [0] * num_blocks
        self._drafted = [False] * num_blocks
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

    def start(
        self, token_ids: Sequence[int], root: BlockIdentity, *, compute_last: bool = True
    ) -> tuple[BlockTable, int]:
        """A table that references the longest cached prefix of `token_ids`, and the tokens it covers.

        With `compute_last` the last token never counts as covered, because its logits are wanted; when the
        cache holds it all the same, its block stays in the table and `grow` copies it before it is written.
        What follows in the lower tier does not count yet: after `grow`, `fill` brings it.
        """
        table = BlockTable(root)
        cached, table.below = self._find(token_ids, root)
        for identity, block in cached:
            self._reference(table, identity, block)
        if self._lower is not None and table.below:
            self._lower.touch(table.below)
        covered = len(table.block_ids) * self.block_size
        return table, min(covered, len(token_ids) - 1) if compute_last and token_ids else covered

    def blocks_needed(self, table: BlockTable, write_from: int, num_tokens: int) -> int:
        """How many blocks `grow` would take."""
        locked, missing = self._plan(table, write_from, num_tokens)
        return len(locked) + missing

    def grow(self, table: BlockTable, write_from: int, num_tokens: int) -> list[BlockCopy]:
        """Make room for `num_tokens` tokens, of which the caller writes those from `write_from` on.

        Blocks in that range which are shared or published are replaced by private ones; the caller copies
        their content at once, in the order given, before any later call to this manager. Raises
        `OutOfBlocksError`, with nothing changed, when there are too few blocks.
        """
        locked, missing = self._plan(table, write_from, num_tokens)
        copies = []
        if locked or missing:
            taken = self._take(len(locked) + missing)
            for index, target in zip(locked, taken, strict=False):
                copies.append(BlockCopy(table.block_ids[index], target))
                self._drafted[target] = self._drafted[table.block_ids[index]]
                table.block_ids[index] = target
            table.block_ids.extend(taken[len(locked) :])
            for copy in reversed(copies):
                self._dereference(copy.source)
        if write_from < num_tokens:
            del table.identities[write_from // self.block_size :]
        return copies

    def missing(self, token_ids: Sequence[int], root: BlockIdentity) -> Iterator[BlockIdentity]:
        """Identities of the full blocks from the first that is not in the pool on."""
        identities = block_identities(root, token_ids, self.block_size)
        return itertools.dropwhile(self._block_of.__contains__, identities)

    def fill(self, table: BlockTable, covered: int, limit: int) -> int:
        """Bring the blocks that `start` found below into those that `grow` took since; call it right after.

        `covered` tokens were covered so far; returns how many are now, at most `limit`. A block that reaches
        beyond stays private, since the caller writes to it. What was lost meanwhile is computed.
        """
        if self._lower is None:
            return covered
        first = len(table.identities)
        count = self._lower.load(table.below, table.block_ids[first : first + len(table.below)])
        if count:
            covered = min((first + count) * self.block_size, limit)
            for identity in table.below[: covered // self.block_size - first]:
                self._share(table, identity)
        table.below.clear()
        self._lower.count_misses(limit // self.block_size - covered // self.block_size)
        return covered

    def hold(self, identities: Sequence[BlockIdentity]) -> BlockTable:
        """A table of the leading ones of these blocks that the pool has; they stay until it is freed."""
        table = BlockTable(root=b"")
        for identity in identities:
            block = self._block_of.get(identity)
            if block is None:
                break
            self._reference(table, identity, block)
        return table

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_committed: int) -> None:
        """Make the full blocks among the first `num_committed` tokens shareable; their KV must be written.

        Where an equal block is already cached, that one stays and this table's own remains private.
        """
        full = num_committed // self.block_size
        if full <= len(table.identities) or not (self.enable_prefix_caching and table.shareable):
            return
        for index in range(len(table.identities), full):
            parent = table.identities[-1] if table.identities else table.root
            start = index * self.block_size
            self._share(table, child_identity(parent, token_ids[start : start + self.block_size]))

    def mark_drafted(self, table: BlockTable, num_places: int) -> None:
        """The first `num_places` places of the table's blocks hold draft KV too."""
        for block in reversed(table.block_ids[: num_places // self.block_size]):
            if self._drafted[block]:
                break
            self._drafted[block] = True

    def num_drafted(self, table: BlockTable) -> int:
        """Leading places of the table's blocks that hold draft KV, as far as is known."""
        full = itertools.takewhile(self._drafted.__getitem__, table.block_ids)
        return sum(1 for _ in full) * self.block_size

    def free(self, table: BlockTable) -> None:
        """Drop all of the table's references and empty it. Safe to repeat.

        The tail becomes evictable before the head, since a block is of no use without those before it.
        """
        for block in reversed(table.block_ids):
            self._dereference(block)
        table.block_ids.clear()
        table.identities.clear()
        table.below.clear()

    def _find(
        self, token_ids: Sequence[int], root: BlockIdentity
    ) -> tuple[list[tuple[BlockIdentity, int]], list[BlockIdentity]]:
        """The longest prefix in the pool, and what follows it in the lower tier."""
        found: list[tuple[BlockIdentity, int]] = []
        below: list[BlockIdentity] = []
        if self._block_of or self._lower is not None:
            for identity in block_identities(root, token_ids, self.block_size):
                block = None if below else self._block_of.get(identity)
                if block is not None:
                    found.append((identity, block))
                elif self._lower is not None and self._lower.holds(identity):
                    below.append(identity)
                else:
                    break
        return found, below

    def _share(self, table: BlockTable, identity: BlockIdentity) -> None:
        """The table's next full block is `identity`; it can be found from now on unless an equal one can."""
        block = table.block_ids[len(table.identities)]
        table.identities.append(identity)
        if identity not in self._block_of and self._identity_of[block] is None:
            self._block_of[identity] = block
            self._identity_of[block] = identity

    def _plan(self, table: BlockTable, write_from: int, num_tokens: int) -> tuple[list[int], int]:
        """Indices of the blocks to be written that must not be written in place, and the blocks missing."""
        block_ids = table.block_ids
        wanted = -(-num_tokens // self.block_size)
        locked = []
        if write_from < num_tokens:
            for index in range(write_from // self.block_size, min(wanted, len(block_ids))):
                block = block_ids[index]
                if self._references[block] > 1 or self._identity_of[block] is not None:
                    locked.append(index)
        return locked, max(0, wanted - len(block_ids))

    def _take(self, count: int) -> list[int]:
        """`count` blocks, each referenced once, in ascending order: adjacent ones make one transfer."""
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} KV blocks are needed, {self.num_available} are available")
        from_free = min(count, len(self._free))
        taken = [self._free.pop() for _ in range(from_free)]
        evicted = [self._evict() for _ in range(count - from_free)]
        if evicted and self._lower is not None:
            self._lower.save(evicted)
        taken.extend(block for _, block in evicted)
        for block in taken:
            self._references[block] = 1
            self._drafted[block] = False
        return sorted(taken)

    def _evict(self) -> Evicted:
        block, _ = self._evictable.popitem(last=False)
        identity = self._identity_of[block]
        assert identity is not None
        del self._block_of[identity]
        self._identity_of[block] = None
        return Evicted(identity, block)

    def _reference(self, table: BlockTable, identity: BlockIdentity, block: int) -> None:
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1
        table.block_ids.append(block)
        table.identities.append(identity)

    def _dereference(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._identity_of[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None
