"""Room for prefix blocks that come from elsewhere."""

from __future__ import annotations

from engine.block_manager import BlockManager
from engine.prefix import find_room, keep
from protocol.ids import block_identities

ROOT = b"r" * 16
TOKENS = list(range(70))


def published(blocks: BlockManager, num_tokens: int) -> None:
    table, _ = blocks.start(TOKENS, ROOT)
    blocks.grow(table, 0, num_tokens)
    blocks.publish(table, TOKENS, num_tokens)
    blocks.free(table)


def test_received_blocks_are_found_by_the_next_sequence() -> None:
    blocks = BlockManager(num_blocks=16, block_size=8)
    published(blocks, 16)
    room = find_room(blocks, TOKENS, ROOT)
    assert room is not None and room.num_cached == 2
    assert room.wanted == list(block_identities(ROOT, TOKENS, 8))[2:]
    keep(blocks, room, num_received=3)
    assert blocks.num_available == blocks.num_blocks and blocks.num_cached == 5
    table, covered = blocks.start(TOKENS, ROOT)
    assert covered == 40
    assert table.block_ids[2:] == room_blocks(blocks)[2:5]


def room_blocks(blocks: BlockManager) -> list[int]:
    return blocks.hold(list(block_identities(ROOT, TOKENS, 8))).block_ids


def test_the_block_of_the_last_token_is_not_wanted() -> None:
    blocks = BlockManager(num_blocks=16, block_size=8)
    room = find_room(blocks, TOKENS[:64], ROOT)
    assert room is not None and len(room.wanted) == 7
    blocks.free(room.table)
    assert blocks.num_free == 16


def test_no_room_where_nothing_is_missing_or_the_pool_is_full() -> None:
    blocks = BlockManager(num_blocks=8, block_size=8)
    assert find_room(blocks, TOKENS[:8], ROOT) is None
    assert find_room(blocks, TOKENS * 2, ROOT) is None
    published(blocks, 64)
    assert find_room(blocks, TOKENS[:66], ROOT) is None
    assert blocks.num_available == blocks.num_blocks


def test_held_blocks_stay_until_they_are_given_back() -> None:
    blocks = BlockManager(num_blocks=8, block_size=8)
    published(blocks, 64)
    identities = list(block_identities(ROOT, TOKENS, 8))
    held = blocks.hold([*identities[:3], b"x" * 16, identities[3]])
    assert len(held.block_ids) == 3
    other, _ = blocks.start([1000], b"o" * 16)
    blocks.grow(other, 0, 5 * 8)
    assert blocks.num_available == 0
    assert blocks.hold(identities).block_ids == held.block_ids
    blocks.free(held)
    assert blocks.num_blocks - blocks.num_available == 8
