"""The blocks that a sequence, a reservation or a loan refers to in each store, and those of a hand-off."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager, Span, Store
from engine.kv.cache_events import CacheEvent
from engine.kv.pool import KVPool
from engine.kv.state_slots import StateLayout
from engine.kv.store_blocks import RecurrentState, Table
from protocol.handoff import Extent, SegmentInfo
from protocol.ids import BlockIdentity, block_identities
from protocol.kv_events import Medium


@dataclass(eq=False)
class SequenceBlocks:
    """The blocks of a sequence in all stores. A token is held if each table has a block with its KV."""

    manager: BlockManager
    root: BlockIdentity
    token_ids: Sequence[int] = ()
    """The tokens of the prefix that was looked up."""
    tables: list[Table] = field(init=False)
    blocks: list[list[int]] = field(init=False)
    """The blocks of each table, as forwards read them."""
    state: RecurrentState | None = field(init=False)
    """The sequence's recurrent state; None for models without recurrent layers."""
    identities: list[BlockIdentity] = field(default_factory=list)
    """The leading full blocks of committed tokens; `blocks` may hold more full blocks."""
    below: list[BlockIdentity] = field(default_factory=list)
    """The blocks after `identities` that some store has in the lower tier only, until `fill`."""
    shareable: bool = True
    """Whether full blocks may be published."""

    def __post_init__(self) -> None:
        self.tables = [Table(store) for store in self.manager.tables]
        self.blocks = [table.blocks for table in self.tables]
        self.state = RecurrentState(self.manager.states) if self.manager.states is not None else None

    def take_up(self, identities: Sequence[BlockIdentity], spans: Sequence[Span]) -> None:
        """Reference the entries of a prefix that are in the pool: in each store the entries in its span.
        Places before the span are not needed, places after it are in the lower tier. A state is referenced
        only if `spans` has a span for its store."""
        for table, span in zip(self.tables, spans, strict=False):
            table.take_up(identities, *span)
        if self.state is not None and identities and len(spans) > len(self.tables):
            self.state.take_up(identities, *spans[-1])
        here = min(last for _, last in spans)
        self.identities, self.below = list(identities[:here]), list(identities[here:])

    @property
    def end_found(self) -> int:
        """End of the tokens whose blocks were found in the pool or the lower tier."""
        return (len(self.identities) + len(self.below)) * self.manager.block_size

    @property
    def first_places(self) -> list[int]:
        """The first place that has a block, for each table."""
        return [table.num_left for table in self.tables]

    @property
    def state_blocks(self) -> list[int]:
        return self.state.blocks if self.state is not None else []

    # --- room ---------------------------------------------------------------------------------------

    def grow(
        self,
        write_from: int,
        num_tokens: int,
        rows: int | None = None,
        *,
        spare: int = 0,
        with_state: bool = False,
    ) -> bool:
        """Make room for `num_tokens` tokens. The caller writes tokens from `write_from` on, so shared or
        published blocks in that range are replaced by private copies. With `rows`, windowed tables get room
        for the window and `rows` rows at a time; `leave` moves it forward.

        Change nothing and return False if too few blocks are available. `spare` blocks for each table must
        stay available, and with `with_state` the blocks of another state.
        """
        size, state = self.manager.block_size, self.state
        end = max(num_tokens, self.manager.least_tokens)
        has_room = end <= size * min(map(len, self.blocks)) and write_from // size >= len(self.identities)
        if has_room and rows is None and not with_state:
            return True  # as in most decode steps
        lacks = self._lacks(write_from, num_tokens, rows)
        num_loaded = state.store.entry_blocks if state is not None and state.is_below else 0
        needed = spare * len(self.tables) + num_loaded + _count(lacks)
        if with_state and state is not None and not state.is_own:
            needed += state.store.entry_blocks
        if needed > self.manager.available:
            return False
        for table, (locked, missing) in zip(self.tables, lacks, strict=True):
            table.take(locked, missing, self.manager.pool)
            if rows is not None:
                table.num_wanted = -(-num_tokens // size)
        if num_loaded and state is not None:
            state.add()
        if write_from < num_tokens:
            del self.identities[write_from // size :]
        return True

    def needs(self, write_from: int, num_tokens: int, rows: int | None = None) -> int:
        """Return the number of blocks that `grow` would take."""
        return _count(self._lacks(write_from, num_tokens, rows))

    def _lacks(self, write_from: int, num_tokens: int, rows: int | None) -> list[tuple[list[int], int]]:
        """Return for each table the places whose blocks must be copied, and the number of missing blocks."""
        size, shared, lacks = self.manager.block_size, len(self.identities), []
        first = write_from // size if write_from < num_tokens else -(-num_tokens // size)
        end = max(num_tokens, self.manager.least_tokens)
        for table in self.tables:
            wanted = table.store.num_blocks(write_from, end, rows)
            touched = range(first, min(wanted, max(shared, table.num_found)))
            locked = [place for place in touched if self.manager.is_locked(table.blocks[place])]
            lacks.append((locked, max(0, wanted - len(table.blocks))))
        return lacks

    def fill(self, covered: int, limit: int) -> int:
        """Load the blocks that were found in the lower tier into blocks that `grow` has just taken. Return
        the end of the covered tokens, at most `limit`; it was `covered`. Lost blocks must be computed. A
        block that reaches beyond `limit` stays private, since the caller writes to it.
        """
        tier, state, size = self.manager.tier, self.state, self.manager.block_size
        if tier is None:
            return covered
        first = len(self.identities)
        end = reached = first + len(self.below)
        for table in self.tables if self.below else ():
            start = table.num_found
            names = [name for each in self.below[start - first :] for name in table.store.names(each)]
            reached = min(reached, start + tier.load(names, table.blocks[start:end]))
        if state is not None and state.is_below:
            names = state.store.names(self.below[-1])
            state.is_lost = tier.load(names, state.blocks) < len(names)
        if reached > first:
            covered = min(reached * size, limit)
            for identity in self.below[: covered // size - first]:
                self._share(identity, self.token_ids)
        if state is not None and state.is_below and not state.is_lost and reached == end:
            self.publish_state(state.position, self.token_ids, state.blocks)
        self.below.clear()
        tier.count_misses(limit // size - covered // size)
        return covered

    def is_complete(self, write_from: int, read_from: int) -> bool:
        """Return whether all blocks to be written are private, and all entries to be read are here."""
        place = max(write_from // self.manager.block_size, len(self.identities))
        if self.state is not None and (self.state.is_lost or self.state.position > read_from):
            return False
        return all(
            table.store.first_place(read_from) >= table.num_left
            and not any(map(self.manager.is_locked, table.blocks[max(place, table.num_left) :]))
            for table in self.tables
        )

    def leave(self, position: int) -> None:
        """Free the blocks that rows from `position` on do not read."""
        if self.manager.has_windows:
            for table in self.tables:
                table.leave(position)

    def free(self) -> None:
        """Drop all references. Idempotent. A state is evicted before the blocks of its tokens, and later
        blocks before earlier ones, since a block is useless without the blocks before it.
        """
        if self.state is not None:
            self.state.drop()
            self.state.passed.clear()
        for table in self.tables:
            table.free()
        self.identities.clear()
        self.below.clear()

    # --- publication --------------------------------------------------------------------------------

    def commit(self, first: int, accepted: Sequence[int], token_ids: Sequence[int]) -> None:
        """Commit the tokens before `first` and the `accepted` nodes, ascending, of the draft after them. Move
        the accepted tokens' KV to their final places.
        """
        if accepted and accepted[-1] >= len(accepted):
            self.manager.pool.move_tokens(self.blocks, first, accepted)
        self.publish(token_ids, first + len(accepted))
        self.leave(first + len(accepted))

    def publish(self, token_ids: Sequence[int], num_committed: int) -> None:
        """Publish the full blocks in the first `num_committed` tokens, whose KV must be written."""
        size, first = self.manager.block_size, len(self.identities)
        full = num_committed // size
        if full <= first or not (self.manager.enable_prefix_caching and self.shareable):
            return
        new = token_ids[first * size : full * size]
        for identity in block_identities(self._parent(first * size), new, size):
            self._share(identity, token_ids)

    def _share(self, identity: BlockIdentity, token_ids: Sequence[int]) -> None:
        """Publish the next full block as `identity`. If an equal one is cached already, ours stays private;
        with states, the cached one replaces ours, since a state's prefix must not be evicted before it.
        """
        place = len(self.identities)
        self.identities.append(identity)
        for table in self.tables:
            if table.share(place, identity, prefers_known=self.state is not None):
                self._log_entry(table.store, place, token_ids)

    def lacks_state(self, position: int) -> bool:
        """Return whether a state at this position could be published and is not yet."""
        place = self._state_place(position)
        return (
            self.state is not None and place >= 0 and self.identities[place] not in self.state.store.entries
        )

    def publish_state(self, position: int, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Publish the state after the first `position` tokens, which is in `blocks`."""
        place, state = self._state_place(position), self.state
        if state is not None and place >= 0:
            state.passed.append(self.identities[place])
            users = 2 if position in state.junctions else 0
            if state.store.publish(self.identities[place], [*blocks], users):
                self._log_entry(state.store, place, token_ids)

    def _state_place(self, position: int) -> int:
        """Return the place of the block that ends at a state; -1 if a state cannot be published there."""
        place = position // self.manager.block_size - 1
        can_be_found = self.state is not None and position % self.state.store.unit == 0
        return place if can_be_found and place < len(self.identities) else -1

    def _parent(self, start: int) -> BlockIdentity:
        """Return the identity before the block that begins at token `start`."""
        return self.identities[start // self.manager.block_size - 1] if start else self.root

    def _log_entry(self, store: Store, place: int, token_ids: Sequence[int]) -> None:
        if store.log is not None:
            start, end = place * self.manager.block_size, (place + 1) * self.manager.block_size
            identity, parent = self.identities[place], self._parent(start)
            event = CacheEvent("stored", Medium.GPU, identity, self.root, parent, token_ids[start:end])
            store.log.add(event)

    # --- draft KV, hand-offs ------------------------------------------------------------------------

    def mark_drafted(self, num_places: int) -> None:
        """Mark the first `num_places` places as holding draft KV, which is in the first table's blocks."""
        drafted = self.manager.drafted
        for block in reversed(self.blocks[0][self.first_places[0] : num_places // self.manager.block_size]):
            if drafted[block]:
                break
            drafted[block] = True

    @property
    def num_drafted(self) -> int:
        """Number of leading places that are known to hold draft KV or are before the window."""
        blocks = self.blocks[0][self.first_places[0] :]
        full = itertools.takewhile(self.manager.drafted.__getitem__, blocks)
        return self.first_kept + sum(1 for _ in full) * self.manager.block_size

    @property
    def first_kept(self) -> int:
        """The first token that has a block in the first table."""
        return self.tables[0].num_left * self.manager.block_size

    def extents(
        self, last: int | None = None, firsts: Sequence[int] = (), *, with_state: bool = True
    ) -> list[Extent]:
        """Return the blocks of each table from its place in `firsts` up to `last` (default: the end), in the
        form in which other workers address them. The state's blocks follow the first table's.
        """
        tables = [[*blocks[:last]] for blocks in self.blocks]
        if with_state:
            tables[0] += self.state_blocks
        return [
            Extent(number, blocks[first:])
            for number, (blocks, first) in enumerate(zip(tables, firsts or itertools.repeat(0), strict=False))
        ]


def _count(lacks: Sequence[tuple[list[int], int]]) -> int:
    return sum(len(locked) + missing for locked, missing in lacks)


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
