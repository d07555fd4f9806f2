"""What somebody has of the KV pool's blocks: room for tokens, copy-on-write, commitment, sharing.

A token has its KV in a block of each arena, and counts as held where all have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.arena import OutOfBlocksError
from engine.block_manager import BlockManager
from engine.cache_events import CacheEvent
from protocol.handoff import Extent
from protocol.ids import BlockIdentity, child_identity
from protocol.kv_events import Medium

NO_BLOCK = 0
"""Of a place that nobody reads; kernels want the number of some block there."""


@dataclass(eq=False)
class Holdings:
    """What one sequence, reservation or loan has of the pool: `blocks` of each arena, in order.

    `identities` are those of the leading full blocks whose tokens are committed; it may lag behind `blocks`.
    `below` are the next ones, as far as they were found in the lower tiers, and `tokens_below` their tokens.
    `spare` are blocks of each arena that `grow` will use before it takes others. Blocks that are not
    `shareable` are never published. `state` are blocks of the first arena with a state of recurrent layers
    that is wanted here, or with room for one. `passed` are the kept states that it began from or left behind.
    `junctions` are where other prompts part from it.

    Behind a sliding window there are no blocks: the first `num_left` places have `NO_BLOCK`. `num_wanted`
    blocks are what the tokens take that it began with.
    """

    manager: BlockManager
    root: BlockIdentity
    blocks: list[list[int]] = field(init=False)
    spare: list[list[int]] = field(init=False)
    state: list[int] = field(default_factory=list)
    passed: list[BlockIdentity] = field(default_factory=list)
    junctions: set[int] = field(default_factory=set)
    identities: list[BlockIdentity] = field(default_factory=list)
    below: list[BlockIdentity] = field(default_factory=list)
    tokens_below: Sequence[int] = ()
    shareable: bool = True
    num_left: int = 0
    num_wanted: int = 0

    def __post_init__(self) -> None:
        self.blocks = [[] for _ in self.manager.arenas]
        self.spare = [[] for _ in self.manager.arenas]

    def reference(self, identity: BlockIdentity) -> bool:
        """Add this block if every arena has it; whether that is so."""
        found = [arena.find(identity) for arena in self.manager.arenas]
        if None in found:
            return False
        for arena, blocks, block in zip(self.manager.arenas, self.blocks, found, strict=True):
            assert block is not None
            arena.reference(block)
            blocks.append(block)
        self.identities.append(identity)
        return True

    def skip(self, identities: Sequence[BlockIdentity]) -> None:
        """Its blocks come behind these, which it does not have."""
        self.num_left, self.identities = len(identities), list(identities)
        for blocks in self.blocks:
            blocks[:0] = [NO_BLOCK] * len(identities)

    def end_at_state(self, limit: int) -> None:
        """Of the blocks with the first `limit` tokens keep those before the last state, and hold that."""
        arena, unit = self.manager.arenas[0], self.manager.state_unit
        last = limit // self.manager.block_size
        num_found = len(self.identities) + len(self.below)
        junction = min(limit, num_found * self.manager.block_size) // unit * unit
        places = range(min(last, len(self.identities)), 0, -1)
        found = (place for place in places if arena.find_state(self.identities[place - 1]) is not None)
        end = next(found, 0)
        if end:
            self.state = arena.use_state(self.identities[end - 1])
            self.passed.append(self.identities[end - 1])
            for block in self.state:
                arena.reference(block)
        if junction > end * self.manager.block_size:
            self.junctions.add(junction)
        self.drop_behind(end)

    def drop_behind(self, end: int) -> None:
        """Keep the first `end` of the blocks that were found."""
        del self.below[max(end - len(self.identities), 0) :]
        for arena, blocks in zip(self.manager.arenas, self.blocks, strict=True):
            for block in reversed(blocks[end:]):
                arena.dereference(block)
            del blocks[end:]
        del self.identities[end:]

    def needs(self, write_from: int, num_tokens: int) -> list[int]:
        """How many blocks of each arena `grow` would take."""
        return [self._needs(index, *lack) for index, lack in enumerate(self._lacks(write_from, num_tokens))]

    def fits(self, write_from: int, num_tokens: int, spare: int = 0, state_blocks: int = 0) -> bool:
        """Whether every arena has what `grow` would take, and `spare` blocks more; and, once the state that
        is held has been read, so many for another one.
        """
        needed = self.needs(write_from, num_tokens)
        spare += max(state_blocks - self._own_state_blocks, 0)
        return all(
            count + spare <= arena.num_available
            for count, arena in zip(needed, self.manager.arenas, strict=True)
        )

    def room_to_begin(self, covered: int, num_tokens: int) -> int:
        """Up to where a sequence of so many tokens needs room when it begins at `covered`: all of it, or with
        a window what it has at a time, beside what others may still read. `leave` moves that room on.
        """
        window = self.manager.window
        if window is None:
            return num_tokens
        self.num_wanted = -(-num_tokens // self.manager.block_size)
        return min(num_tokens, covered + window.span(self.manager.most_rows))

    def leave(self, position: int) -> None:
        """Rows before `position` do not come again: blocks that later ones do not read go, and until all that
        is wanted has its place as many take places at the end.
        """
        window = self.manager.window
        if window is None:
            return
        first = window.first_place(position)
        if first <= self.num_left:
            return
        for arena, blocks in zip(self.manager.arenas, self.blocks, strict=True):
            left = blocks[self.num_left : first]
            num_own = sum(arena.num_references(block) == 1 for block in left)
            for block in left:
                arena.dereference(block)
            blocks[self.num_left : first] = [NO_BLOCK] * len(left)
            blocks.extend(arena.take(max(min(num_own, self.num_wanted - len(blocks)), 0)))
        self.num_left = first

    def reads_back_from(self, position: int) -> bool:
        """Whether it has all that rows from there on read."""
        window = self.manager.window
        return window is None or window.first_place(position) >= self.num_left

    def grow(self, write_from: int, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens, of which the caller writes those from `write_from` on.

        Blocks in that range which are shared or published are replaced by private copies. Raises
        `OutOfBlocksError`, with nothing changed, when there are too few blocks.
        """
        size = self.manager.block_size
        is_here = num_tokens <= size * min(map(len, self.blocks)) and self._has_least
        if is_here and write_from // size >= len(self.identities):
            return  # as in most decode steps
        lacks = self._lacks(write_from, num_tokens)
        for index, arena in enumerate(self.manager.arenas):
            needed, available = self._needs(index, *lacks[index]), arena.num_available
            if needed > available:
                raise OutOfBlocksError(f"{needed} KV blocks are needed, {available} are available")
        for index, (locked, missing) in enumerate(lacks):
            self._take(index, locked, missing)
        if write_from < num_tokens:
            del self.identities[write_from // size :]

    def fill(self, covered: int, limit: int) -> int:
        """Bring the blocks that `start` found below into those that `grow` took since; call it right after.

        The tokens before `covered` were covered so far; returns up to where they are now, at most `limit`. A
        block that reaches beyond stays private, since the caller writes to it. What was lost meanwhile is
        computed.
        """
        size, tiers = self.manager.block_size, self.manager.tiers
        if not tiers:
            return covered
        first, last = len(self.identities), len(self.identities) + len(self.below)
        counts = [
            tier.load(self.below, blocks[first:last]) for tier, blocks in zip(tiers, self.blocks, strict=True)
        ]
        if min(counts):
            covered = min((first + min(counts)) * size, limit)
            for index, identity in enumerate(self.below[: covered // size - first]):
                self._share(identity, self.tokens_below[index * size : (index + 1) * size])
        self.below.clear()
        for tier in tiers:
            tier.count_misses(limit // size - covered // size)
        return covered

    def commit(self, first: int, accepted: Sequence[int], token_ids: Sequence[int]) -> None:
        """Of a sequence with these tokens those before `first` are computed, and behind them a draft.

        `accepted`, ascending, are the drafted tokens that it keeps: their KV moves to where it belongs.
        """
        if accepted and accepted[-1] >= len(accepted):
            self.manager.pool.move_tokens(self.blocks, first, accepted)
        self.publish(token_ids, first + len(accepted))
        self.leave(first + len(accepted))

    def publish(self, token_ids: Sequence[int], num_committed: int) -> None:
        """Make the full blocks among the first `num_committed` tokens shareable; their KV must be written.

        Where an equal block is already cached, that one stays and ours remains private. Where states are
        kept it takes the place of ours: the prefix of a state that we keep must not age before it.
        """
        size = self.manager.block_size
        full = num_committed // size
        if full <= len(self.identities) or not (self.manager.enable_prefix_caching and self.shareable):
            return
        for start in range(len(self.identities) * size, full * size, size):
            block = token_ids[start : start + size]
            self._share(child_identity(self._last_identity, block), block)

    def mark_drafted(self, num_places: int) -> None:
        """The first `num_places` places hold draft KV too. That lies in the first arena."""
        drafted = self.manager.arenas[0].drafted
        for block in reversed(self.blocks[0][: num_places // self.manager.block_size]):
            if drafted[block]:
                break
            drafted[block] = True

    @property
    def num_drafted(self) -> int:
        """Leading places that hold draft KV, as far as is known."""
        full = itertools.takewhile(self.manager.arenas[0].drafted.__getitem__, self.blocks[0])
        return sum(1 for _ in full) * self.manager.block_size

    def publish_state(self, position: int, token_ids: Sequence[int], blocks: list[int]) -> None:
        """These blocks hold the state behind the first `position` tokens. It can be found from now on if the
        blocks of the tokens can.
        """
        size, place = self.manager.block_size, position // self.manager.block_size
        if not self.can_keep(position):
            return
        identity, at_junction = self.identities[place - 1], position in self.junctions
        is_new = self.manager.arenas[0].publish_state(identity, blocks, at_junction=at_junction)
        self.passed.append(identity)
        if is_new and self.manager.log is not None:
            parent = self.identities[place - 2] if place > 1 else self.root
            tokens = token_ids[position - size : position]
            self.manager.log.add(CacheEvent("stored", Medium.GPU, identity, self.root, parent, tokens))

    def can_keep(self, position: int) -> bool:
        """Whether a state behind so many tokens could be found again."""
        unit = self.manager.state_unit
        return 0 < position <= len(self.identities) * self.manager.block_size and position % unit == 0

    def has_state(self, position: int) -> bool:
        """Whether it can be found already."""
        place = position // self.manager.block_size
        found = self.can_keep(position) and self.manager.arenas[0].find_state(self.identities[place - 1])
        return bool(found)

    def age_states(self) -> None:
        """There is soon one further on: those that were passed are hardly of use any more."""
        for identity in self.passed:
            self.manager.arenas[0].age_state(identity)

    def add_state(self, count: int) -> None:
        """Take as many blocks for a state. Raises `OutOfBlocksError`."""
        arena = self.manager.arenas[0]
        if count > arena.num_available:
            raise OutOfBlocksError(
                f"{count} blocks are needed for a state, {arena.num_available} are available"
            )
        self.state += arena.take(count)

    def places_behind(self, num_tokens: int, count: int) -> list[int]:
        """The next `count` blocks behind those of so many tokens, as others address them."""
        first = num_tokens // self.manager.block_size
        return (self.blocks[0] + self.state)[first : first + count]

    def drop_state(self) -> None:
        for block in self.state:
            self.manager.arenas[0].dereference(block)
        self.state.clear()

    def extents(self, first: int = 0, last: int | None = None) -> list[Extent]:
        """The blocks [`first`, `last`) of each arena, as others address them; without `last` all of them,
        those of the state at the end.
        """
        extents = [Extent(arena, blocks[first:last]) for arena, blocks in enumerate(self.blocks)]
        if last is None and self.state:
            extents[0] = Extent(0, (self.blocks[0] + self.state)[first:])
        return extents

    def free(self) -> None:
        """Drop all references. Safe to repeat.

        The tail becomes evictable before the head, since a block is of no use without those before it, and a
        state before both.
        """
        self.drop_state()
        for arena, blocks, spare in zip(self.manager.arenas, self.blocks, self.spare, strict=True):
            for block in reversed(blocks[self.num_left :] + spare):
                arena.dereference(block)
            blocks.clear()
            spare.clear()
        self.num_left = 0
        self.identities.clear()
        self.passed.clear()
        self.below.clear()

    def _lacks(self, write_from: int, num_tokens: int) -> list[tuple[list[int], int]]:
        """Of each arena: places in the table of blocks to be written that must not be written in place, and
        how many blocks are missing.
        """
        size = self.manager.block_size
        wanted = -(-num_tokens // size)
        first = write_from // size if write_from < num_tokens else wanted
        lacks = []
        for arena, blocks in zip(self.manager.arenas, self.blocks, strict=True):
            touched = range(first, min(wanted, len(self.identities)))  # those behind are ours alone
            locked = [index for index in touched if arena.is_locked(blocks[index])]
            lacks.append((locked, max(0, wanted - len(blocks))))
        return lacks

    @property
    def _own_state_blocks(self) -> int:
        """That nobody else holds."""
        arena = self.manager.arenas[0]
        return len(self.state) if all(arena.num_references(block) == 1 for block in self.state) else 0

    @property
    def _has_least(self) -> bool:
        return self.manager.least_blocks <= len(self.blocks[0]) + len(self.spare[0])

    def _needs(self, index: int, locked: list[int], missing: int) -> int:
        """Blocks of the arena beyond the spare ones."""
        reserved = max(missing, self.manager.least_blocks - len(self.blocks[index]))
        return max(len(locked) + reserved - len(self.spare[index]), 0)

    def _take(self, index: int, locked: list[int], missing: int) -> None:
        arena, blocks = self.manager.arenas[index], self.blocks[index]
        fresh = self.spare[index] + arena.take(self._needs(index, locked, missing))
        taken, self.spare[index] = fresh[: len(locked) + missing], fresh[len(locked) + missing :]
        sources = [blocks[place] for place in locked]
        for place, source, target in zip(locked, sources, taken, strict=False):
            self.manager.pool.copy_block(index, source, target)
            arena.drafted[target] = arena.drafted[source]
            blocks[place] = target
        blocks.extend(taken[len(locked) :])
        for source in reversed(sources):
            arena.dereference(source)

    def _share(self, identity: BlockIdentity, token_ids: Sequence[int]) -> None:
        """The next full block is `identity` and has these tokens."""
        place, is_new, keeps_states = len(self.identities), False, self.manager.state_unit > 0
        for arena, blocks in zip(self.manager.arenas, self.blocks, strict=True):
            is_new |= arena.publish(identity, blocks[place])
            known = arena.find(identity)
            if keeps_states and known is not None and known != blocks[place]:
                arena.reference(known)
                arena.dereference(blocks[place])
                blocks[place] = known
        if is_new and self.manager.log is not None and not keeps_states:
            event = CacheEvent("stored", Medium.GPU, identity, self.root, self._last_identity, token_ids)
            self.manager.log.add(event)
        self.identities.append(identity)

    @property
    def _last_identity(self) -> BlockIdentity:
        """The parent of the next block."""
        return self.identities[-1] if self.identities else self.root
