"""Holdings that begin with a cached prefix.

What lower tiers have of it comes back to the pool. A model with recurrent layers goes on from a state alone:
its prefix counts up to the last block behind which a state is kept, in blocks of the first arena. Where all
layers attend within a sliding window, a prefix needs no more blocks than those that a row at its end reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from engine.arena import OutOfBlocksError
from engine.block_manager import BlockManager
from engine.holdings import Holdings
from protocol.ids import BlockIdentity, block_identities
from protocol.window import Window


def find_prefix(
    blocks: BlockManager,
    token_ids: Sequence[int],
    root: BlockIdentity,
    *,
    compute_last: bool = True,
    from_state: bool = True,
) -> tuple[Holdings, int]:
    """Holdings with the longest cached prefix of `token_ids`, and the position up to which it is covered.

    With `compute_last` the last token never counts as covered, because its logits are wanted; when the
    cache holds it all the same, its blocks stay and `grow` copies them before they are written. What
    follows in the lower tiers does not count yet: after `grow`, `fill` brings it.

    Where states are kept it is covered up to one in the pool, which is then held too, unless that comes
    from elsewhere (`from_state` is false).
    """
    held = Holdings(blocks, root)
    limit = len(token_ids) - (1 if compute_last and token_ids else 0)
    identities = block_identities(root, token_ids, blocks.block_size)
    if blocks.window is not None:
        _find_window(held, blocks.window, list(identities), limit)
    else:
        _find_leading(held, identities)
    for tier in blocks.tiers if held.below else ():
        tier.touch(held.below)
    if blocks.state_unit and from_state:
        held.end_at_state(limit)
    covered = len(held.identities) * blocks.block_size
    held.tokens_below = token_ids[covered : covered + len(held.below) * blocks.block_size]
    return held, min(covered, limit)


def _find_leading(held: Holdings, identities: Iterable[BlockIdentity]) -> None:
    """The leading ones of these blocks that the pool has, and those below that follow."""
    for identity in identities:
        if held.below or not held.reference(identity):
            if not held.manager.has_below(identity):
                break
            held.below.append(identity)


def _find_window(held: Holdings, window: Window, identities: list[BlockIdentity], limit: int) -> None:
    """Those that a row at position `limit` reads, or one behind as many of these blocks as there can be."""
    blocks = held.manager
    first, middle, end = _last_window(window, identities, limit, blocks.has, blocks.has_below)
    held.skip(identities[:first])
    for identity in identities[first:middle]:
        held.reference(identity)
    held.below = identities[middle:end]


def _last_window(
    window: Window,
    identities: Sequence[BlockIdentity],
    limit: int,
    has: Callable[[BlockIdentity], bool],
    has_below: Callable[[BlockIdentity], bool],
) -> tuple[int, int, int]:
    """Of the longest prefix whose window is there: the first block to be read, the first one of these that
    lies below, and the end.
    """
    here, below = (_runs([look(identity) for identity in identities]) for look in (has, has_below))
    for end in range(len(identities), 0, -1):
        first = window.first_place(min(end * window.block_size, limit))
        middle = min(here[first], end)
        if below[middle] >= end:
            return first, middle, end
    return 0, 0, 0


def _runs(flags: Sequence[bool]) -> list[int]:
    """For each place the end of those from there on that are set."""
    ends = [len(flags)] * (len(flags) + 1)
    for place in range(len(flags) - 1, -1, -1):
        ends[place] = ends[place + 1] if flags[place] else place
    return ends


def reserve_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity, *, from_state: bool = True
) -> tuple[Holdings, int] | None:
    """Room for all of `token_ids`, and a state where there are such, which somebody else writes, and up
    to where it is filled (as `find_prefix` says). Behind a sliding window nobody has to write, so that counts
    as filled too.

    None if there is too little.
    """
    held, covered = find_prefix(blocks, token_ids, root, compute_last=False, from_state=from_state)
    held.drop_state()
    end = len(token_ids)
    found = covered + len(held.below) * blocks.block_size
    if blocks.window is not None and found < (first := blocks.window.first_place(end)) * blocks.block_size:
        held.free()
        held.skip(_leading(root, token_ids, blocks.block_size, first))
        covered = first * blocks.block_size
    try:
        held.grow(end, end)
        held.add_state(blocks.pool.state_blocks)
    except OutOfBlocksError:
        held.free()
        return None
    covered = held.fill(covered, end)
    held.leave(end)
    if len(held.identities) < held.num_left:
        held.identities = _leading(root, token_ids, blocks.block_size, held.num_left)
    return held, max(covered, held.num_left * blocks.block_size)


def _leading(root: BlockIdentity, token_ids: Sequence[int], size: int, count: int) -> list[BlockIdentity]:
    return list(islice(block_identities(root, token_ids, size), count))


def hold_blocks(blocks: BlockManager, identities: Sequence[BlockIdentity]) -> Holdings:
    """The leading ones of these blocks that the pool has; they stay until they are freed. Where states
    are kept they end at one, which is held too. With a window those that a row behind them reads.
    """
    held = Holdings(blocks, root=b"")
    if window := blocks.window:
        end = len(identities) * window.block_size
        first, _, last = _last_window(window, identities, end, blocks.has, lambda _: False)
        held.skip(identities[:first])
        identities = identities[first:last]
    for identity in identities:
        if not held.reference(identity):
            break
    if blocks.state_unit:
        held.end_at_state(len(held.identities) * blocks.block_size)
    return held


def missing_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> Iterable[BlockIdentity]:
    """Identities of the full blocks from the first that is not in the pool on; with a window, of those that
    lie below the longest prefix that the tiers know of.
    """
    identities = block_identities(root, token_ids, blocks.block_size)
    if blocks.window is None:
        return itertools.dropwhile(blocks.has, identities)
    known = list(identities)
    _, middle, end = _last_window(blocks.window, known, len(token_ids) - 1, blocks.has, blocks.tiers[0].knows)
    return known[middle:end]
