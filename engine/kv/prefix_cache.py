"""Lookup of cached prefixes in all stores, and room for sequences that begin with one.

A prefix is usable if each store has, in the pool or in the lower tier, all entries that the next row reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv.block_manager import BlockManager, Holds, Span, Store
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.handoff import Extent
from protocol.ids import BlockIdentity, block_identities

Found = tuple[SequenceBlocks, int]
"""Blocks of a sequence, and the position up to which they cover its tokens."""


def find_prefix(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity, *, compute_last: bool = True
) -> Found:
    """Return the longest cached prefix of `token_ids`, and the position up to which the pool covers it.

    With `compute_last` the last token never counts as covered, because its logits are needed; if it is in a
    cached block, the block is copied before it is written. Blocks in the lower tier count after `fill`.
    """
    limit = len(token_ids) - (1 if compute_last and token_ids else 0)
    held = _look_up(blocks, blocks.stores, token_ids, root, limit)
    return held, min(len(held.identities) * blocks.block_size, limit)


def admit(
    blocks: BlockManager,
    token_ids: Sequence[int],
    root: BlockIdentity,
    *,
    shares_prefix: bool = True,
    spare: int = 0,
    hands_over: bool = False,
) -> Found | None:
    """Take room for a sequence that is computed here from the covered position on; return None without room.

    `spare` blocks for each table stay available. A sequence that `hands_over` also needs room for its state.
    """
    limit = len(token_ids) - 1
    return _take_room(
        lambda: find_prefix(blocks, token_ids if shares_prefix else token_ids[:1], root),
        lambda held: held.grow(
            min(held.end_found, limit), limit + 1, blocks.most_rows, spare=spare, with_state=hands_over
        ),
        limit,
    )


def reserve_blocks(blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity) -> Found | None:
    """Take room for `token_ids`, and for a state if the model has one; another worker writes them from the
    covered position on. Places before a sliding window count as covered. Return None without room.
    """
    end = len(token_ids)

    def find() -> Found:
        held = _look_up(blocks, blocks.tables, token_ids, root, end, read_from=end)
        return held, len(held.identities) * blocks.block_size

    found = _take_room(find, lambda held: held.grow(end, end, with_state=True), end, read_from=end)
    if found is None:
        return None
    held, covered = found
    if held.state is not None:
        held.state.add()
    return held, max(covered, min(held.first_places) * blocks.block_size)


def _take_room(
    find: Callable[[], Found],
    grow: Callable[[SequenceBlocks], bool],
    limit: int,
    read_from: int | None = None,
) -> Found | None:
    """Take room for the found prefix and the tokens after it, and fill it from the lower tier."""
    while True:
        held, covered = find()
        if not grow(held):
            held.free()
            return None
        covered = held.fill(covered, limit)
        if held.is_complete(covered, covered if read_from is None else read_from):
            return held, covered
        held.free()  # blocks evicted here have displaced some of these in the tier: look again


@dataclass(eq=False)
class PrefixRoom:
    """Room for blocks of a prompt's prefix that another worker sends before the request is added.

    Tokens before `covered` are here; `wanted` are the blocks after them. A worker that holds the first n of
    them sends the blocks that a row after them reads. `keep`, or freeing `sequence_blocks`, ends the room.
    """

    token_ids: list[int]
    sequence_blocks: SequenceBlocks
    covered: int
    wanted: list[BlockIdentity]

    def __post_init__(self) -> None:
        self._size = self.sequence_blocks.manager.block_size
        self._first = self.covered // self._size

    @property
    def extents(self) -> list[Extent]:
        """The blocks in the form in which other workers address them."""
        return self.sequence_blocks.extents(len(self.token_ids) // self._size)

    def num_sent(self, num_blocks: int) -> int:
        """Return how many blocks of all tables a holder of the first `num_blocks` wanted ones sends."""
        end = self._first + num_blocks
        firsts = (table.store.first_place(end * self._size) for table in self.sequence_blocks.tables)
        return sum(end - max(first, self._first) for first in firsts)

    def keep(self, num_blocks: int, num_drafted: int = 0) -> None:
        """Publish the first `num_blocks` wanted blocks, and the recurrent state after them if the model has
        one; they have arrived. The places before `num_drafted` also hold draft KV.
        """
        held, end = self.sequence_blocks, self._first + num_blocks
        for table in held.tables:
            table.skip(self._first, end * self._size)
        if held.num_drafted >= self.covered:
            held.mark_drafted(min(end * self._size, num_drafted))
        held.publish(self.token_ids, end * self._size)
        if num_blocks and held.state is not None:  # its blocks follow the last block
            state = self.extents[0].blocks[end : end + held.state.store.entry_blocks]
            held.publish_state(end * self._size, self.token_ids, state)
        held.free()


def find_room(blocks: BlockManager, token_ids: list[int], root: BlockIdentity) -> PrefixRoom | None:
    """Take room for the full blocks of `token_ids` that are missing here; return None without room.

    The last token's block is left out: that token is computed in any case, for its logits.
    """
    size = blocks.block_size
    shared = token_ids[: (len(token_ids) - 1) // size * size]
    found = _take_room(
        lambda: find_prefix(blocks, shared, root, compute_last=False),
        lambda held: held.grow(held.end_found, len(shared), rows=0, with_state=True),
        len(shared),
    )
    if found is None:
        return None
    held, covered = found
    if held.state is not None:
        held.state.drop()
        held.state.add()
    return PrefixRoom(shared, held, covered, [*block_identities(root, shared, size)][covered // size :])


def hold_blocks(
    blocks: BlockManager, identities: Sequence[BlockIdentity], first_block: int = 0
) -> SequenceBlocks:
    """Reference the longest prefix of these blocks in the pool, as far as a row after it reads them. The
    blocks follow `first_block` others.
    """
    limit = (first_block + len(identities)) * blocks.block_size
    _, prefix, spans = _longest_prefix(blocks.stores, identities, limit, None, first_block)
    held = SequenceBlocks(blocks, b"")
    held.take_up(prefix, spans)
    return held


def missing_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> tuple[list[BlockIdentity], int]:
    """Return the lower tiers' names of the blocks that the pool lacks from the longest prefix known to any
    tier, and the number of full blocks after that prefix.
    """
    knows = blocks.tier.knows if blocks.tier is not None else None
    identities = block_identities(root, token_ids, blocks.block_size)
    _, prefix, spans = _longest_prefix(blocks.stores, identities, len(token_ids) - 1, knows)
    names = _names_below(blocks.stores, prefix, spans)
    return names, len(token_ids) // blocks.block_size - len(prefix)


def _look_up(
    blocks: BlockManager,
    stores: Sequence[Store],
    token_ids: Sequence[int],
    root: BlockIdentity,
    limit: int,
    read_from: int | None = None,
) -> SequenceBlocks:
    """Reference the longest prefix in these stores."""
    tier, held = blocks.tier, SequenceBlocks(blocks, root, token_ids)
    identities = block_identities(root, token_ids, blocks.block_size)
    holds = tier.holds if tier is not None else None
    known, prefix, spans = _longest_prefix(stores, identities, limit, holds, read_from=read_from)
    held.take_up(prefix, spans)
    if held.below and tier is not None:
        tier.touch(_names_below(stores, prefix, spans))
    if held.state is not None:
        unit = held.state.store.unit
        junction = min(limit, len(known) * blocks.block_size) // unit * unit
        if junction > len(prefix) * blocks.block_size:
            held.state.junctions.add(junction)
    return held


def _names_below(
    stores: Sequence[Store], prefix: Sequence[BlockIdentity], spans: Sequence[Span]
) -> list[BlockIdentity]:
    """Return the lower tiers' names of the prefix's entries after each store's span."""
    return [
        name
        for store, (_, here) in zip(stores, spans, strict=True)
        for identity in prefix[here:]
        for name in store.names(identity)
    ]


def _longest_prefix(
    stores: Sequence[Store],
    identities: Iterable[BlockIdentity],
    limit: int,
    holds: Holds | None,
    first_block: int = 0,
    read_from: int | None = None,
) -> tuple[Sequence[BlockIdentity], Sequence[BlockIdentity], list[Span]]:
    """Return the leading blocks that all stores of layers without a window have; the longest prefix of them
    of which a row at `read_from` finds all that it reads; and each store's span. The default `read_from` is
    right after the prefix, at most `limit`.
    """
    known, here = _leading([store for store in stores if store.sees_all], identities, holds)
    for end in range(len(known), 0, -1):
        position = min((first_block + end) * stores[0].block_size, limit) if read_from is None else read_from
        spans: list[Span] = []
        for store in stores:
            if store in here:
                spans.append((0, min(here[store], end)))
            elif span := store.span(known, end, first_block, position, holds):
                spans.append(span)
            else:
                break
        else:
            return known, known[:end], spans
    firsts = [store.first_place(read_from or 0) for store in stores]
    return known, [], [(first, first) for first in firsts]


def _leading(
    stores: Sequence[Store], identities: Iterable[BlockIdentity], holds: Holds | None
) -> tuple[list[BlockIdentity], dict[Store, int]]:
    """Return the leading blocks that each of these stores has first in the pool, then in the lower tier, and
    how many each has in the pool.
    """
    here = dict.fromkeys(stores, 0)
    known: list[BlockIdentity] = []
    for place, identity in enumerate(identities):
        for store in stores:
            if here[store] == place and identity in store.entries:
                here[store] = place + 1
            elif not store.is_below(identity, holds):
                return known, here
        known.append(identity)
    return known, here
