"""Leading blocks of a prompt that come from another worker, before the request itself is taken up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.lower_states import bring_up
from engine.kv.prefix_cache import find_prefix, reserve_blocks
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.ids import BlockIdentity, block_identities


@dataclass(eq=False)
class PrefixRoom:
    """Room for a prompt's prefix. What lies before `covered` is there, `wanted` names the blocks after it, if
    any.

    Of tables within a sliding window there is room for one behind `covered`: whoever has some of the blocks
    that are wanted sends those that a row behind them reads.

    It ends with `keep`, or when its `sequence_blocks` are freed.
    """

    token_ids: list[int]
    sequence_blocks: SequenceBlocks
    covered: int
    wanted: list[BlockIdentity]

    def num_sent(self, num_blocks: int) -> int:
        """Blocks of all tables that come from somebody who has the first `num_blocks` that are wanted."""
        manager, first = self.sequence_blocks.manager, self.covered // self.sequence_blocks.manager.block_size
        end = first + num_blocks
        read = (table.first_place(end * manager.block_size) for table in manager.tables)
        return sum(end - max(place, first) for place in read)

    def keep(self, num_blocks: int, num_drafted: int = 0) -> None:
        """Of those that were wanted the first `num_blocks` have come, as far as a row behind them reads them,
        where there are states with one behind them, and go to the prefix cache; the others are free again.
        The places before `num_drafted` hold the draft's KV too.
        """
        manager = self.sequence_blocks.manager
        num_tokens = self.covered + num_blocks * manager.block_size
        self.sequence_blocks.skip(self.covered // manager.block_size, num_tokens)
        if self.sequence_blocks.num_drafted >= self.covered:
            self.sequence_blocks.mark_drafted(min(num_tokens, num_drafted))
        self.sequence_blocks.publish(self.token_ids, num_tokens)
        if num_blocks and manager.pool.state_blocks:
            state = self.sequence_blocks.places_behind(num_tokens, manager.pool.state_blocks)
            self.sequence_blocks.publish_state(num_tokens, self.token_ids, state)
        self.sequence_blocks.free()


def find_room(blocks: BlockManager, token_ids: list[int], root: BlockIdentity) -> PrefixRoom | None:
    """Room for the full blocks that `token_ids` lack here; None if there is too little.

    The block of the last token is left out: that token is computed in any case, for its logits.
    """
    size = blocks.block_size
    shared = token_ids[: (len(token_ids) - 1) // size * size]
    if blocks.tiers and blocks.state_unit:
        bring_up(blocks, token_ids, root)
    if blocks.has_windows:
        reserved = _reserve_window(blocks, shared, root)
    else:
        reserved = reserve_blocks(blocks, shared, root)
    if reserved is None:
        return None
    sequence_blocks, covered = reserved
    wanted = islice(block_identities(root, shared, size), covered // size, None)
    return PrefixRoom(shared, sequence_blocks, covered, list(wanted))


def _reserve_window(
    blocks: BlockManager, shared: list[int], root: BlockIdentity
) -> tuple[SequenceBlocks, int] | None:
    held, covered = find_prefix(blocks, shared, root, compute_last=False)
    try:
        held.grow(held.end_found, len(shared), rows=0)
    except OutOfBlocksError:
        held.free()
        return None
    covered = held.fill(covered, len(shared))
    if not held.goes_on_from(covered):
        held.free()
        return None
    return held, covered
