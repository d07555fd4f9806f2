"""Prefixes of models with recurrent layers in the tiers below the pool.

A state lies there as the blocks that it has in the pool, each with an identity of its own. Such a prefix
comes up as far as there is a state behind it, and goes to the prefix cache of the pool, where it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.prefix_cache import find_prefix
from protocol.ids import BlockIdentity, block_identities, state_identities


def bring_up(blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity) -> None:
    """From the host memory, as much as a sequence of these tokens could go on from."""
    held, covered = find_prefix(blocks, token_ids, root, compute_last=False, from_state=False)
    tier, num_here = blocks.tiers[0], len(held.identities)
    found = [*held.identities, *held.below][: (len(token_ids) - 1) // blocks.block_size]
    end, parts = _last_state(blocks, found, tier.holds)
    held.drop_behind(end)
    if end > num_here or parts:
        num_tokens = end * blocks.block_size
        tier.touch(parts)
        try:
            held.grow(num_tokens, num_tokens)
            held.add_state(len(parts))
        except OutOfBlocksError:
            held.free()
            return
        held.fill(min(covered, num_tokens), num_tokens)
        if parts and tier.load(parts, held.state) == len(parts):
            held.publish_state(num_tokens, token_ids, held.state)
    held.free()


def missing_with_state(
    blocks: BlockManager, token_ids: Sequence[int], root: BlockIdentity
) -> list[BlockIdentity]:
    """What the pool lacks of such a prefix, on the disk too: its blocks and those of its state."""
    known = []
    for identity in block_identities(root, token_ids[: len(token_ids) - 1], blocks.block_size):
        if blocks.block_pools[0].find(identity) is None and not blocks.tiers[0].knows(identity):
            break
        known.append(identity)
    end, parts = _last_state(blocks, known, blocks.tiers[0].knows)
    return [identity for identity in known[:end] if blocks.block_pools[0].find(identity) is None] + parts


def _last_state(
    blocks: BlockManager, identities: Sequence[BlockIdentity], holds: Callable[[BlockIdentity], bool]
) -> tuple[int, list[BlockIdentity]]:
    """How many of these blocks lead to the last state, and the identities of its blocks; of none if it is in
    the pool.
    """
    for end in range(len(identities), 0, -1):
        if blocks.block_pools[0].find_state(identities[end - 1]) is not None:
            return end, []
        parts = state_identities(identities[end - 1], blocks.pool.state_blocks)
        if all(map(holds, parts)):
            return end, parts
    return 0, []
