"""Holdings that begin with a cached prefix.

What lower tiers have of it comes back to the pool. A model with recurrent layers goes on from a state alone:
its prefix counts up to the last block behind which a state is kept, in blocks of the first arena.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.arena import OutOfBlocksError
from engine.block_manager import BlockManager
from engine.holdings import Holdings
from protocol.ids import BlockIdentity, block_identities


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
    for identity in block_identities(root, token_ids, blocks.block_size):
        if held.below or not held.reference(identity):
            if not (blocks.tiers and all(tier.holds(identity) for tier in blocks.tiers)):
                break
            held.below.append(identity)
    for tier in blocks.tiers if held.below else ():
        tier.touch(held.below)
    if blocks.state_unit and from_state:
        held.end_at_state(len(token_ids) - (1 if compute_last else 0))
    covered = len(held.identities) * blocks.block_size
    held.tokens_below = token_ids[covered : covered + len(held.below) * blocks.block_size]
    return held, min(covered, len(token_ids) - 1) if compute_last and token_ids else covered


def reserve_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity, *, from_state: bool = True
) -> tuple[Holdings, int] | None:
    """Room for all of `token_ids`, and a state where there are such, which somebody else writes, and up
    to where it is filled (as `find_prefix` says).

    None if there is too little.
    """
    held, covered = find_prefix(blocks, token_ids, root, compute_last=False, from_state=from_state)
    held.drop_state()
    try:
        held.grow(len(token_ids), len(token_ids))
        held.add_state(blocks.pool.state_blocks)
    except OutOfBlocksError:
        held.free()
        return None
    return held, held.fill(covered, len(token_ids))


def hold_blocks(blocks: BlockManager, identities: Sequence[BlockIdentity]) -> Holdings:
    """The leading ones of these blocks that the pool has; they stay until they are freed. Where states
    are kept they end at one, which is held too.
    """
    held = Holdings(blocks, root=b"")
    for identity in identities:
        if not held.reference(identity):
            break
    if blocks.state_unit:
        held.end_at_state(len(held.identities) * blocks.block_size)
    return held


def missing_blocks(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> Iterator[BlockIdentity]:
    """Identities of the full blocks from the first that is not in the pool on."""
    identities = block_identities(root, token_ids, blocks.block_size)
    return itertools.dropwhile(blocks.has, identities)
