"""What somebody has of the KV pool's blocks: room for tokens, copy-on-write, commitment, sharing.

A token has its KV in a block of each table, of which each block pool has one or more, and counts as held
where all have it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager, Table
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.cache_events import CacheEvent
from protocol.handoff import Extent
from protocol.ids import BlockIdentity, child_identity
from protocol.kv_events import Medium

NO_BLOCK = 0
"""Of a place that nobody reads; kernels want the number of some block there."""


@dataclass(eq=False)
class SequenceBlocks:
    """What one sequence, reservation or loan has of the pool: `blocks` of each table, in order.

    `identities` are those of the leading full blocks whose tokens are committed; it may lag behind `blocks`.
    `below` are the next ones, as far as they were found in the lower tiers, or in some tables, which have
    `num_found` blocks then, and `tokens_below` their tokens.
    `spare` are blocks of each table that `grow` will use before it takes others. Blocks that are not
    `shareable` are never published. `state` are blocks of the first block pool with a state of recurrent
    layers
    that is wanted here, or with room for one. `passed` are the kept states that it began from or left behind.
    `junctions` are where other prompts part from it.

    Behind a sliding window there are no blocks: the first `num_left` places of a table have `NO_BLOCK`.
    `num_wanted` blocks are what the tokens take that it began with.
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
    num_left: list[int] = field(init=False)
    num_found: list[int] = field(default_factory=list)
    num_wanted: int = 0

    def __post_init__(self) -> None:
        self.blocks = [[] for _ in self.manager.tables]
        self.spare = [[] for _ in self.manager.tables]
        self.num_left = [0] * len(self.manager.tables)

    def reference(self, identity: BlockIdentity) -> bool:
        """Add this block if every table has it; whether that is so."""
        tables = self.manager.tables
        if not all(table.has(identity) for table in tables):
            return False
        for table, blocks in zip(tables, self.blocks, strict=True):
            blocks.append(_referenced(table, identity))
        self.identities.append(identity)
        return True

    def take_up(self, identities: Sequence[BlockIdentity], spans: Sequence[tuple[int, int]]) -> None:
        """Of these blocks, those that are in the pool: of each table the places from its span's first one to
        the second. What lies before is not needed, what lies behind is below.
        """
        least = min(last for _, last in spans)
        self.identities, self.below = list(identities[:least]), list(identities[least:])
        self.num_left, self.num_found = [first for first, _ in spans], [last for _, last in spans]
        for table, blocks, (first, last) in zip(self.manager.tables, self.blocks, spans, strict=True):
            blocks[:] = [NO_BLOCK] * first
            blocks += [_referenced(table, identity) for identity in identities[first:last]]

    @property
    def end_found(self) -> int:
        """Tokens of the blocks that are here or below."""
        return (len(self.identities) + len(self.below)) * self.manager.block_size

    def skip(self, place: int, position: int) -> None:
        """The blocks from `place` on are of places that rows from this position on read: where these come
        behind it, it lets go of those before it.
        """
        for index, (table, blocks) in enumerate(zip(self.manager.tables, self.blocks, strict=True)):
            first = table.first_place(position)
            if first > place:
                for block in blocks[self.num_left[index] : place]:
                    table.block_pool.dereference(block)
                blocks[:place] = [NO_BLOCK] * first
                self.num_left[index] = first

    def end_at_state(self, limit: int) -> None:
        """Of the blocks with the first `limit` tokens keep those before the last state, and hold that."""
        block_pool, unit = self.manager.block_pools[0], self.manager.state_unit
        last = limit // self.manager.block_size
        num_found = len(self.identities) + len(self.below)
        junction = min(limit, num_found * self.manager.block_size) // unit * unit
        places = range(min(last, len(self.identities)), 0, -1)
        found = (place for place in places if block_pool.find_state(self.identities[place - 1]) is not None)
        end = next(found, 0)
        if end:
            self.state = block_pool.use_state(self.identities[end - 1])
            self.passed.append(self.identities[end - 1])
            for block in self.state:
                block_pool.reference(block)
        if junction > end * self.manager.block_size:
            self.junctions.add(junction)
        self.drop_behind(end)

    def drop_behind(self, end: int) -> None:
        """Keep the first `end` of the blocks that were found."""
        del self.below[max(end - len(self.identities), 0) :]
        for table, blocks in zip(self.manager.tables, self.blocks, strict=True):
            for block in reversed(blocks[end:]):
                table.block_pool.dereference(block)
            del blocks[end:]
        del self.identities[end:]

    def needs(self, write_from: int, num_tokens: int, rows: int | None = None) -> list[int]:
        """How many blocks of each block pool `grow` would take."""
        return self._needed(self._lacks(write_from, num_tokens, rows))

    def fits(
        self,
        write_from: int,
        num_tokens: int,
        rows: int | None = None,
        *,
        spare: int = 0,
        state_blocks: int = 0,
    ) -> bool:
        """Whether every block pool has what `grow` would take, and `spare` blocks more for each table;
        and, once the state that is held has been read, so many for another one.
        """
        needed = self.needs(write_from, num_tokens, rows)
        spare = spare * len(self.blocks) // len(needed) + max(state_blocks - self._own_state_blocks, 0)
        return all(
            count + spare <= block_pool.num_available
            for count, block_pool in zip(needed, self.manager.block_pools, strict=True)
        )

    def leave(self, position: int) -> None:
        """Rows before `position` do not come again: blocks that later ones do not read go, and until all that
        is wanted has its place as many take places at the end.
        """
        if not self.manager.has_windows:
            return
        for index, (table, blocks) in enumerate(zip(self.manager.tables, self.blocks, strict=True)):
            block_pool, first, num_left = table.block_pool, table.first_place(position), self.num_left[index]
            if first <= num_left:
                continue
            left = blocks[num_left:first]
            num_own = sum(block_pool.num_references(block) == 1 for block in left)
            for block in left:
                block_pool.dereference(block)
            blocks[num_left:first] = [NO_BLOCK] * len(left)
            blocks.extend(block_pool.take(max(min(num_own, self.num_wanted - len(blocks)), 0)))
            self.num_left[index] = first

    def goes_on_from(self, position: int) -> bool:
        """Whether it has all that rows from there on read, and what they write is its own."""
        tables = zip(self.manager.tables, self.num_left, strict=True)
        return self.is_own_from(position) and all(
            table.first_place(position) >= num_left for table, num_left in tables
        )

    def is_own_from(self, position: int) -> bool:
        """Whether nobody else has the blocks behind those that are found."""
        place = max(position // self.manager.block_size, len(self.identities))
        tables = zip(self.manager.tables, self.blocks, self.num_left, strict=True)
        return not any(
            any(map(table.block_pool.is_locked, blocks[max(place, num_left) :]))
            for table, blocks, num_left in tables
        )

    def grow(self, write_from: int, num_tokens: int, rows: int | None = None) -> None:
        """Make room for `num_tokens` tokens, of which the caller writes those from `write_from` on. With
        `rows`, what lies within a window gets room for so many at a time alone; `leave` moves that on.

        Blocks in that range which are shared or published are replaced by private copies. Raises
        `OutOfBlocksError`, with nothing changed, when there are too few blocks.
        """
        size = self.manager.block_size
        is_here = num_tokens <= size * min(map(len, self.blocks)) and self._has_least
        if is_here and write_from // size >= len(self.identities):
            return  # as in most decode steps
        lacks = self._lacks(write_from, num_tokens, rows)
        for needed, block_pool in zip(self._needed(lacks), self.manager.block_pools, strict=True):
            available = block_pool.num_available
            if needed > available:
                raise OutOfBlocksError(f"{needed} KV blocks are needed, {available} are available")
        if rows is not None:
            self.num_wanted = -(-num_tokens // size)
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
        first = len(self.identities)
        reached = self._load(first, first + len(self.below)) if self.below else first
        if reached > first:
            covered = min(reached * size, limit)
            for index, identity in enumerate(self.below[: covered // size - first]):
                self._share(identity, self.tokens_below[index * size : (index + 1) * size])
        self.below.clear()
        self.num_found.clear()
        for tier in tiers:
            tier.count_misses(limit // size - covered // size)
        return covered

    def _load(self, first: int, last: int) -> int:
        """Up to which of these places all tables have their blocks now."""
        reached = []
        starts = self.num_found or [first] * len(self.blocks)
        for table, blocks, start in zip(self.manager.tables, self.blocks, starts, strict=True):
            assert table.tier is not None
            identities = table.below(self.below[start - first :])
            reached.append(start + table.tier.load(identities, blocks[start:last]))
        return min(reached)

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
        """The first `num_places` places hold draft KV too. That lies in the first block_pool."""
        drafted = self.manager.block_pools[0].drafted
        for block in reversed(self.blocks[0][self.num_left[0] : num_places // self.manager.block_size]):
            if drafted[block]:
                break
            drafted[block] = True

    @property
    def num_drafted(self) -> int:
        """Leading places that hold draft KV, as far as is known, or are behind a window."""
        blocks = self.blocks[0][self.num_left[0] :]
        full = itertools.takewhile(self.manager.block_pools[0].drafted.__getitem__, blocks)
        return self.first_kept + sum(1 for _ in full) * self.manager.block_size

    @property
    def first_kept(self) -> int:
        """The first token that the first table has a block of."""
        return self.num_left[0] * self.manager.block_size

    def publish_state(self, position: int, token_ids: Sequence[int], blocks: list[int]) -> None:
        """These blocks hold the state behind the first `position` tokens. It can be found from now on if the
        blocks of the tokens can.
        """
        size, place = self.manager.block_size, position // self.manager.block_size
        if not self.can_keep(position):
            return
        identity, at_junction = self.identities[place - 1], position in self.junctions
        is_new = self.manager.block_pools[0].publish_state(identity, blocks, at_junction=at_junction)
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
        found = self.can_keep(position) and self.manager.block_pools[0].find_state(self.identities[place - 1])
        return bool(found)

    def age_states(self) -> None:
        """There is soon one further on: those that were passed are hardly of use any more."""
        for identity in self.passed:
            self.manager.block_pools[0].age_state(identity)

    def add_state(self, count: int) -> None:
        """Take as many blocks for a state. Raises `OutOfBlocksError`."""
        block_pool = self.manager.block_pools[0]
        if count > block_pool.num_available:
            raise OutOfBlocksError(
                f"{count} blocks are needed for a state, {block_pool.num_available} are available"
            )
        self.state += block_pool.take(count)

    def places_behind(self, num_tokens: int, count: int) -> list[int]:
        """The next `count` blocks behind those of so many tokens, as others address them."""
        first = num_tokens // self.manager.block_size
        return (self.blocks[0] + self.state)[first : first + count]

    def drop_state(self) -> None:
        for block in self.state:
            self.manager.block_pools[0].dereference(block)
        self.state.clear()

    def extents(self, firsts: Sequence[int] = (), last: int | None = None) -> list[Extent]:
        """The blocks of each table from its one of the `firsts` on, by default all, up to `last`, as others
        address them; without `last` all of them, those of the state at the end.
        """
        firsts = firsts or [0] * len(self.blocks)
        extents = [
            Extent(table, blocks[first:last])
            for table, (blocks, first) in enumerate(zip(self.blocks, firsts, strict=True))
        ]
        if last is None and self.state:
            extents[0] = Extent(0, (self.blocks[0] + self.state)[firsts[0] :])
        return extents

    def free(self) -> None:
        """Drop all references. Safe to repeat.

        The tail becomes evictable before the head, since a block is of no use without those before it, and a
        state before both.
        """
        self.drop_state()
        for index, table in enumerate(self.manager.tables):
            blocks, spare = self.blocks[index], self.spare[index]
            for block in reversed(blocks[self.num_left[index] :] + spare):
                table.block_pool.dereference(block)
            blocks.clear()
            spare.clear()
            self.num_left[index] = 0
        self.identities.clear()
        self.passed.clear()
        self.below.clear()

    def _lacks(self, write_from: int, num_tokens: int, rows: int | None) -> list[tuple[list[int], int]]:
        """Of each table: places of blocks to be written that must not be written in place, and how many
        blocks are missing.
        """
        size = self.manager.block_size
        first = write_from // size if write_from < num_tokens else -(-num_tokens // size)
        lacks = []
        found = self.num_found or [0] * len(self.blocks)
        for table, blocks, num_found in zip(self.manager.tables, self.blocks, found, strict=True):
            end = num_tokens
            if rows is not None and table.window is not None:
                end = min(end, write_from + table.window.span(rows))
            wanted = -(-end // size)
            num_shared = max(len(self.identities), num_found)  # those behind are ours alone
            touched = range(first, min(wanted, num_shared))
            locked = [index for index in touched if table.block_pool.is_locked(blocks[index])]
            lacks.append((locked, max(0, wanted - len(blocks))))
        return lacks

    def _needed(self, lacks: list[tuple[list[int], int]]) -> list[int]:
        """Of each block_pool."""
        needed: Counter[int] = Counter()
        for index, (table, lack) in enumerate(zip(self.manager.tables, lacks, strict=True)):
            needed[table.index] += self._needs(index, *lack)
        return [needed[index] for index in range(len(self.manager.block_pools))]

    @property
    def _own_state_blocks(self) -> int:
        """That nobody else holds."""
        block_pool = self.manager.block_pools[0]
        return len(self.state) if all(block_pool.num_references(block) == 1 for block in self.state) else 0

    @property
    def _has_least(self) -> bool:
        return self.manager.least_blocks <= len(self.blocks[0]) + len(self.spare[0])

    def _needs(self, index: int, locked: list[int], missing: int) -> int:
        """Blocks of the table beyond the spare ones."""
        reserved = max(missing, self.manager.least_blocks - len(self.blocks[index]))
        return max(len(locked) + reserved - len(self.spare[index]), 0)

    def _take(self, index: int, locked: list[int], missing: int) -> None:
        table, blocks = self.manager.tables[index], self.blocks[index]
        block_pool = table.block_pool
        fresh = self.spare[index] + block_pool.take(self._needs(index, locked, missing))
        taken, self.spare[index] = fresh[: len(locked) + missing], fresh[len(locked) + missing :]
        sources = [blocks[place] for place in locked]
        for place, source, target in zip(locked, sources, taken, strict=False):
            self.manager.pool.copy_block(table.index, source, target)
            block_pool.drafted[target] = block_pool.drafted[source]
            blocks[place] = target
        blocks.extend(taken[len(locked) :])
        for source in reversed(sources):
            block_pool.dereference(source)

    def _share(self, identity: BlockIdentity, token_ids: Sequence[int]) -> None:
        """The next full block is `identity` and has these tokens."""
        place, is_new, keeps_states = len(self.identities), False, self.manager.state_unit > 0
        for index, (table, blocks) in enumerate(zip(self.manager.tables, self.blocks, strict=True)):
            if place < self.num_left[index]:
                continue
            block_pool = table.block_pool
            is_new |= block_pool.publish(identity, blocks[place], table.number) and table.number == 0
            known = block_pool.find(identity)
            if keeps_states and known is not None and known != blocks[place]:
                block_pool.reference(known)
                block_pool.dereference(blocks[place])
                blocks[place] = known
        if is_new and self.manager.log is not None and not keeps_states:
            event = CacheEvent("stored", Medium.GPU, identity, self.root, self._last_identity, token_ids)
            self.manager.log.add(event)
        self.identities.append(identity)

    @property
    def _last_identity(self) -> BlockIdentity:
        """The parent of the next block."""
        return self.identities[-1] if self.identities else self.root


def _referenced(table: Table, identity: BlockIdentity) -> int:
    """Its block, which is in the pool."""
    block = table.block_pool.find(identity, table.number)
    assert block is not None
    table.block_pool.reference(block)
    return block
