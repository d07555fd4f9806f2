"""SequenceBlocks that begin with a cached prefix.

What lower tiers have of it comes back to the pool. A model with recurrent layers goes on from a state alone:
its prefix counts up to the last block behind which a state is kept, in blocks of the first block_pool. Of
tables within a sliding window a prefix needs no more blocks than those that a row at its end reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from engine.kv.block_manager import BlockManager, Table
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.ids import BlockIdentity, block_identities, table_identity

Look = Callable[[Table, BlockIdentity], bool]


def find_prefix(
    blocks: BlockManager,
    token_ids: Sequence[int],
    root: BlockIdentity,
    *,
    compute_last: bool = True,
    from_state: bool = True,
) -> tuple[SequenceBlocks, int]:
    """SequenceBlocks with the longest cached prefix of `token_ids`, and the position up to which it is
    covered.

    With `compute_last` the last token never counts as covered, because its logits are wanted; when the
    cache holds it all the same, its blocks stay and `grow` copies them before they are written. What
    follows in the lower tiers does not count yet: after `grow`, `fill` brings it.

    Where states are kept it is covered up to one in the pool, which is then held too, unless that comes
    from elsewhere (`from_state` is false).
    """
    held = SequenceBlocks(blocks, root)
    limit = len(token_ids) - (1 if compute_last and token_ids else 0)
    identities = block_identities(root, token_ids, blocks.block_size)
    if blocks.has_windows:
        known = list(identities)
        held.take_up(*longest_prefix(blocks, known, limit, Table.has_below))
    else:
        _find_leading(held, identities)
    _touch(held)
    if blocks.state_unit and from_state:
        held.end_at_state(limit)
    covered = len(held.identities) * blocks.block_size
    held.tokens_below = token_ids[covered : covered + len(held.below) * blocks.block_size]
    return held, min(covered, limit)


def _find_leading(held: SequenceBlocks, identities: Iterable[BlockIdentity]) -> None:
    """The leading ones of these blocks that the pool has, and those below that follow."""
    for identity in identities:
        if held.below or not held.reference(identity):
            if not all(table.has_below(identity) for table in held.manager.tables):
                break
            held.below.append(identity)


def _touch(held: SequenceBlocks) -> None:
    """What lies below will soon be loaded."""
    for table in held.manager.tables if held.below else ():
        if table.tier is not None:
            table.tier.touch(table.below(held.below))


def longest_prefix(
    blocks: BlockManager,
    identities: Sequence[BlockIdentity],
    limit: int,
    has_below: Look,
    first_block: int = 0,
) -> tuple[Sequence[BlockIdentity], list[tuple[int, int]]]:
    """The longest prefix of these blocks of which a row at position `limit`, or one behind as many of them
    as there are, finds all that it reads; and of each table the first place that it reads, and up to where
    they are in the pool. They follow `first_block` others, which are there.
    """
    all_seen = {
        table: _runs(table, identities, 0, len(identities), has_below)
        for table in blocks.tables
        if table.window is None
    }
    most = min([len(identities), *(known for _, known in all_seen.values())])
    for end in range(most, 0, -1):
        position, spans = min((first_block + end) * blocks.block_size, limit), []
        for table in blocks.tables:
            first = max(table.first_place(position) - first_block, 0)
            here, known = all_seen.get(table) or _runs(table, identities, first, end, has_below)
            if known < end:
                break
            spans.append((first, min(here, end)))
        else:
            return identities[:end], spans
    return [], [(0, 0)] * len(blocks.tables)


def _runs(
    table: Table, identities: Sequence[BlockIdentity], first: int, end: int, has_below: Look
) -> tuple[int, int]:
    """Up to where the blocks from `first` on are in the pool, and those behind these below; `end` at most."""
    here = first
    while here < end and table.has(identities[here]):
        here += 1
    known = here
    while known < end and has_below(table, identities[known]):
        known += 1
    return here, known


def reserve_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity, *, from_state: bool = True
) -> tuple[SequenceBlocks, int] | None:
    """Room for all of `token_ids`, and a state where there are such, which somebody else writes, and up
    to where it is filled (as `find_prefix` says). Behind a sliding window nobody has to write, so that counts
    as filled too.

    None if there is too little.
    """
    end = len(token_ids)
    if blocks.has_windows:
        held, covered = _find_for(blocks, token_ids, root)
    else:
        held, covered = find_prefix(blocks, token_ids, root, compute_last=False, from_state=from_state)
    held.drop_state()
    try:
        held.grow(end, end)
        held.add_state(blocks.pool.state_blocks)
    except OutOfBlocksError:
        held.free()
        return None
    covered = held.fill(covered, end)
    if not held.is_own_from(covered):  # what was found below is lost meanwhile: look again
        held.free()
        return reserve_blocks(blocks, token_ids, root, from_state=from_state)
    return held, max(covered, min(held.num_left) * blocks.block_size)


def _find_for(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> tuple[SequenceBlocks, int]:
    """What there is of all that a row behind these tokens reads, and up to where that is all."""
    held, size = SequenceBlocks(blocks, root), blocks.block_size
    identities = list(block_identities(root, token_ids, size))
    firsts = [table.first_place(len(token_ids)) for table in blocks.tables]
    runs = [
        _runs(table, identities, first, len(identities), Table.has_below)
        for table, first in zip(blocks.tables, firsts, strict=True)
    ]
    end = min(known for _, known in runs)
    spans = [(first, max(min(here, end), first)) for first, (here, _) in zip(firsts, runs, strict=True)]
    held.take_up(identities[:end], spans)
    _touch(held)
    covered = len(held.identities) * size
    held.tokens_below = token_ids[covered : held.end_found]
    return held, covered


def hold_blocks(
    blocks: BlockManager, identities: Sequence[BlockIdentity], first_block: int = 0
) -> SequenceBlocks:
    """The leading ones of these blocks that the pool has; they stay until they are freed. Where states
    are kept they end at one, which is held too. With a window those that a row behind them reads; they
    follow `first_block` others.
    """
    held = SequenceBlocks(blocks, root=b"")
    if blocks.has_windows:
        limit = (first_block + len(identities)) * blocks.block_size
        held.take_up(*longest_prefix(blocks, identities, limit, _nothing_below, first_block))
        return held
    for identity in identities:
        if not held.reference(identity):
            break
    if blocks.state_unit:
        held.end_at_state(len(held.identities) * blocks.block_size)
    return held


def _nothing_below(table: Table, identity: BlockIdentity) -> bool:
    return False


def missing_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> Iterable[BlockIdentity]:
    """Identities, as the tiers know them, of the full blocks from the first that is not in the pool on; with
    a window, of those that lie below the longest prefix that the tiers know of.
    """
    identities = block_identities(root, token_ids, blocks.block_size)
    if not blocks.has_windows:
        return itertools.dropwhile(blocks.tables[0].has, identities)
    known, spans = longest_prefix(blocks, list(identities), len(token_ids) - 1, _is_known_below)
    missing = (table.below(known[here:]) for table, (_, here) in zip(blocks.tables, spans, strict=True))
    return itertools.chain.from_iterable(missing)


def _is_known_below(table: Table, identity: BlockIdentity) -> bool:
    """Also on the disk."""
    return table.tier is not None and table.tier.knows(table_identity(identity, table.number))
