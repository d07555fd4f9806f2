"""Leading blocks of a prompt that come from another worker, before the request itself is taken up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from engine.block_manager import BlockManager, BlockTable, OutOfBlocksError
from protocol.ids import BlockIdentity, block_identities


@dataclass(eq=False)
class PrefixRoom:
    """Blocks for a prompt's prefix. The first `num_cached` are filled, `wanted` names the others.

    It ends with `keep`, or when its `table` is freed.
    """

    token_ids: list[int]
    table: BlockTable
    num_cached: int
    wanted: list[BlockIdentity]


def find_room(blocks: BlockManager, token_ids: list[int], root: BlockIdentity) -> PrefixRoom | None:
    """Room for the full blocks that `token_ids` lack here; None if they lack none, or there is too little.

    The block of the last token is left out: that token is computed in any case, for its logits.
    """
    num_full = (len(token_ids) - 1) // blocks.block_size
    num_tokens = num_full * blocks.block_size
    table, covered = blocks.start(token_ids[:num_tokens], root, compute_last=False)
    try:
        blocks.grow(table, num_tokens, num_tokens)
    except OutOfBlocksError:
        blocks.free(table)
        return None
    num_cached = blocks.fill(table, covered, num_tokens) // blocks.block_size
    if num_cached == num_full:
        blocks.free(table)
        return None
    identities = block_identities(root, token_ids[:num_tokens], blocks.block_size)
    return PrefixRoom(token_ids, table, num_cached, list(islice(identities, num_cached, None)))


def keep(blocks: BlockManager, room: PrefixRoom, num_received: int) -> None:
    """Publish the leading `num_received` of the wanted blocks; the others are free again."""
    num_tokens = (room.num_cached + num_received) * blocks.block_size
    blocks.publish(room.table, room.token_ids, num_tokens)
    blocks.free(room.table)
