"""The blocks of a sequence, also of one whose KV lies in two block pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.cache_events import CacheLog
from engine.kv.layout import TARGET, Group, LayerPlace, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.kv.prefix_cache import find_prefix, reserve_blocks
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.handoff import Extent
from protocol.ids import block_identities, root_identity
from protocol.kv_events import Medium
from tests.engine.cached_prefix import cached_prefix
from tests.engine.fake_pool import FakePool

SIZE = 4
ROOT = root_identity("model", "fp32")
TOKENS = list(range(12))


def started(manager: BlockManager, token_ids: list[int]) -> tuple[SequenceBlocks, int]:
    held, covered = find_prefix(manager, token_ids, ROOT)
    held.grow(covered, len(token_ids))
    return held, covered


def test_new_blocks_are_adjacent_where_they_can_be() -> None:
    manager = BlockManager(FakePool(SIZE, 16))
    first, _ = started(manager, [0] * 20)
    first.free()
    assert started(manager, [0] * 40)[0].blocks[0] == list(range(10))


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_copied_block_holds_the_draft_kv_that_its_source_holds(is_drafted: bool) -> None:
    """A block that had draft KV before may be the target."""
    pool = FakePool(SIZE, 4)
    manager = BlockManager(pool)
    first, _ = started(manager, TOKENS[:8])
    first.publish(TOKENS, 8)
    if is_drafted:
        first.mark_drafted(8)
    second, _ = started(manager, TOKENS[:8])
    assert len(pool.copies) == 1
    assert second.num_drafted == (8 if is_drafted else 0)


def test_without_prefix_caching_nothing_is_kept() -> None:
    manager = BlockManager(FakePool(SIZE, 4), enable_prefix_caching=False)
    held, _ = started(manager, TOKENS[:8])
    held.publish(TOKENS, 8)
    assert cached_prefix(manager, TOKENS, ROOT) == 0
    held.free()
    assert (manager.num_free, manager.num_cached) == (4, 0)


def test_room_is_taken_in_every_block_pool_or_in_none() -> None:
    manager = BlockManager(FakePool(SIZE, 8, 3))
    first, _ = started(manager, TOKENS[:5])
    assert first.blocks == [[0, 1], [0, 1]]
    second, _ = find_prefix(manager, [], ROOT)
    assert second.needs(0, 5) == [2, 2]
    assert second.fits(0, 4) and not second.fits(0, 5) and not second.fits(0, 4, spare=1)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are needed, 1 are available"):
        second.grow(0, 5)
    assert second.blocks == [[], []] and manager.available == (6, 1)
    assert reserve_blocks(manager, [7] * 5, ROOT) is None
    second.grow(0, 4)
    assert second.extents() == [Extent(0, [2]), Extent(1, [2])]
    first.free()
    second.free()
    assert manager.available == (8, 3)


def test_a_position_is_covered_where_every_block_pool_has_its_blocks() -> None:
    manager = BlockManager(FakePool(SIZE, 12, 4))
    held, _ = started(manager, TOKENS)
    held.publish(TOKENS, 12)
    held.free()
    _, covered = started(manager, [50] * 8)  # the second block pool gives up the last block of the three
    assert covered == 0 and manager.available == (10, 2)
    again, covered = find_prefix(manager, TOKENS, ROOT)
    assert covered == 8 and [len(blocks) for blocks in again.blocks] == [2, 2]


def test_a_block_to_be_written_is_copied_in_the_block_pool_that_shares_it() -> None:
    pool = FakePool(SIZE, 8, 8)
    manager = BlockManager(pool)
    held, _ = started(manager, TOKENS[:8])
    held.publish(TOKENS, 8)
    started(manager, TOKENS[:8])
    assert pool.copies == [(0, 1, 2), (1, 1, 2)]


class FakeTier:
    """Holds these identities, and loses those `lost` before they are loaded."""

    def __init__(self, identities: list[bytes], lost: int = 0) -> None:
        self.identities, self.lost = identities, lost
        self.loaded: list[int] = []
        self.asked: list[bytes] = []
        self.num_missed = 0

    def holds(self, identity: bytes) -> bool:
        return identity in self.identities

    def touch(self, identities: list[bytes]) -> None:
        pass

    def load(self, identities: list[bytes], block_ids: list[int]) -> int:
        self.asked += identities
        self.loaded = block_ids[: len(block_ids) - self.lost]
        return len(self.loaded)

    def count_misses(self, num_blocks: int) -> None:
        self.num_missed += num_blocks

    def watch(self, log: CacheLog) -> None:
        pass

    def contents(self) -> list[tuple[Medium, bytes]]:
        return []


def test_lower_tiers_bring_what_all_of_them_hold() -> None:
    identities = list(block_identities(ROOT, TOKENS, SIZE))
    tiers = [FakeTier(identities), FakeTier(identities[:2], lost=1)]
    manager = BlockManager(FakePool(SIZE, 8, 8), tiers=tiers)
    held, covered = find_prefix(manager, TOKENS, ROOT)
    assert covered == 0 and held.below == identities[:2]
    held.grow(0, 12)
    assert held.fill(0, 11) == 4
    assert [tier.loaded for tier in tiers] == [[0, 1], [0]]
    assert [tier.num_missed for tier in tiers] == [1, 1]
    assert held.identities == identities[:1] and not held.below


def test_blocks_that_come_back_are_told_with_their_tokens() -> None:
    tier = FakeTier(list(block_identities(ROOT, TOKENS, SIZE)))
    manager = BlockManager(FakePool(SIZE, 8), tiers=[tier])
    held, _ = started(manager, TOKENS)
    held.publish(TOKENS, 4)
    held.free()
    log = manager.watch()
    log.take()
    held, covered = started(manager, TOKENS)
    assert (covered, held.fill(covered, 12)) == (4, 12)
    told = [(event.kind, event.token_ids) for event in log.take()]
    assert told == [("stored", TOKENS[4:8]), ("stored", TOKENS[8:])]


def test_a_block_is_told_to_be_there_while_every_block_pool_has_it() -> None:
    manager = BlockManager(FakePool(SIZE, 8, 3))
    log = manager.watch()
    held, _ = started(manager, TOKENS)
    held.publish(TOKENS, 12)
    held.free()
    log.take()
    started(manager, [100])  # the second block pool has no other room
    (event,) = log.take()
    first, second, third = block_identities(ROOT, TOKENS, SIZE)
    assert (event.kind, event.identity) == ("removed", third)
    assert {event.identity for event in manager.contents() if event.kind == "stored"} == {first, second}


def test_a_chain_moves_nothing_and_a_tree_moves_before_its_blocks_are_published() -> None:
    pool = FakePool(SIZE, 8, 8)
    manager = BlockManager(pool)
    held, _ = started(manager, TOKENS)
    held.commit(2, [0, 1], TOKENS)
    assert not pool.moves and len(held.identities) == 1
    held.commit(6, [1, 3], TOKENS)
    assert pool.moves == [(held.blocks, 6, [1, 3])] and len(held.identities) == 2


def test_the_accepted_path_of_a_tree_moves_in_every_group() -> None:
    window = Group("window", (Segment(1, 1, 8, torch.bfloat16),), (LayerPlace(0, 0),), block_pool=1)
    layout = PoolLayout((Group.uniform(TARGET, Segment(2, 2, 4, torch.float32)), window), SIZE)
    pool = KVPool(layout, 6, torch.device("cpu"), None)
    assert [blocks.shape[1] for blocks in pool.block_pools] == [2 * 2 * SIZE * 2 * 4 * 4, 2 * SIZE * 8 * 2]
    assert [(info.name, info.block_pool, info.kind) for info in pool.segments] == [
        (TARGET, 0, "paged"),
        ("window", 1, "paged"),
    ]
    manager = BlockManager(pool)
    started(manager, [1])  # takes a block of each block pool
    manager.block_pools[1].take(1)
    held, _ = started(manager, TOKENS)
    assert held.blocks == [[1, 2, 3], [2, 3, 4]]
    values = {name: pool.segment(name) for name in (TARGET, "window")}
    for tensor in values.values():
        tensor.copy_(torch.randn(tensor.shape))
    before = {name: tensor.clone() for name, tensor in values.items()}
    held.commit(6, [1, 4], TOKENS)

    def at(tensor: Tensor, blocks: list[int], place: int) -> Tensor:
        return tensor[blocks[place // SIZE], :, :, place % SIZE]

    for (name, tensor), blocks in zip(values.items(), held.blocks, strict=True):
        for target, source in ((5, 5), (6, 7), (7, 10), (8, 8)):
            assert torch.equal(at(tensor, blocks, target), at(before[name], blocks, source))
