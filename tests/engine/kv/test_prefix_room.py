"""Room for prefix blocks that come from elsewhere."""

from __future__ import annotations

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_cache import find_prefix, hold_blocks
from engine.kv.prefix_room import find_room
from protocol.ids import block_identities
from tests.engine.fake_pool import FakePool

ROOT = b"r" * 16
TOKENS = list(range(70))


def published(blocks: BlockManager, num_tokens: int) -> None:
    table, _ = find_prefix(blocks, TOKENS, ROOT)
    table.grow(0, num_tokens)
    table.publish(TOKENS, num_tokens)
    table.free()


def test_received_blocks_are_found_by_the_next_sequence() -> None:
    blocks = BlockManager(FakePool(8, 16))
    published(blocks, 16)
    room = find_room(blocks, TOKENS, ROOT)
    assert room is not None and room.covered == 16
    assert room.wanted == list(block_identities(ROOT, TOKENS, 8))[2:]
    room.keep(3)
    assert sum(blocks.available) == blocks.num_blocks and blocks.num_cached == 5
    table, covered = find_prefix(blocks, TOKENS, ROOT)
    assert covered == 40
    assert table.blocks[0][2:] == room_blocks(blocks)[2:5]


def room_blocks(blocks: BlockManager) -> list[int]:
    return hold_blocks(blocks, list(block_identities(ROOT, TOKENS, 8))).blocks[0]


def test_the_block_of_the_last_token_is_not_wanted() -> None:
    blocks = BlockManager(FakePool(8, 16))
    room = find_room(blocks, TOKENS[:64], ROOT)
    assert room is not None and len(room.wanted) == 7
    room.sequence_blocks.free()
    assert blocks.num_free == 16


def test_no_room_where_the_pool_is_full_and_none_is_needed_where_nothing_is_missing() -> None:
    blocks = BlockManager(FakePool(8, 8))
    assert find_room(blocks, TOKENS * 2, ROOT) is None
    published(blocks, 64)
    for tokens, covered in ((TOKENS[:8], 0), (TOKENS[:66], 64)):
        room = find_room(blocks, tokens, ROOT)
        assert room is not None and (room.wanted, room.covered) == ([], covered)
        room.sequence_blocks.free()
    assert sum(blocks.available) == blocks.num_blocks


def test_held_blocks_stay_until_they_are_given_back() -> None:
    blocks = BlockManager(FakePool(8, 8))
    published(blocks, 64)
    identities = list(block_identities(ROOT, TOKENS, 8))
    held = hold_blocks(blocks, [*identities[:3], b"x" * 16, identities[3]])
    assert len(held.blocks[0]) == 3
    other, _ = find_prefix(blocks, [1000], b"o" * 16)
    other.grow(0, 5 * 8)
    assert sum(blocks.available) == 0
    assert hold_blocks(blocks, identities).blocks[0] == held.blocks[0]
    held.free()
    assert blocks.num_blocks - sum(blocks.available) == 8
