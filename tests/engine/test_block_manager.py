"""The block manager's single rules, one by one."""

import pytest

from engine.block_manager import BlockManager
from engine.block_pool import OutOfBlocksError
from engine.prefix_cache import find_prefix
from protocol.ids import root_identity
from tests.engine.cached_prefix import cached_prefix
from tests.engine.fake_pool import FakePool

BLOCK_SIZE = 4
ROOT = root_identity("model", "fp32")


def computed(manager: BlockManager, token_ids: list[int]):
    """A table whose tokens are all written and published."""
    table, covered = find_prefix(manager, token_ids, ROOT)
    table.grow(covered, len(token_ids))
    table.publish(token_ids, len(token_ids))
    return table


def counts(manager: BlockManager) -> tuple[int, int, int]:
    assert sum(manager.available) == manager.num_free + manager.num_cached
    return manager.num_free, manager.num_cached, manager.num_blocks - sum(manager.available)


def test_a_fresh_pool_is_all_free():
    assert counts(BlockManager(FakePool(BLOCK_SIZE, 8))) == (8, 0, 0)


def test_grow_takes_blocks_only_when_needed():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    table, covered = find_prefix(manager, list(range(6)), ROOT)
    assert (table.blocks[0], covered) == ([], 0)
    assert table.needs(0, 6) == [2]
    table.grow(0, 6)
    assert table.blocks[0] == [0, 1]
    assert table.needs(6, 8) == [0]
    table.grow(6, 8)
    assert table.blocks[0] == [0, 1]
    table.grow(8, 9)
    assert table.blocks[0] == [0, 1, 2]


def test_new_blocks_are_adjacent_where_they_can_be():
    manager = BlockManager(FakePool(BLOCK_SIZE, 16))
    first, _ = find_prefix(manager, [0] * 20, ROOT)
    first.grow(0, 20)
    first.free()
    second, _ = find_prefix(manager, [0] * 40, ROOT)
    second.grow(0, 40)
    assert second.blocks[0] == list(range(10))


def test_full_blocks_of_an_equal_prefix_are_shared():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    first = computed(manager, list(range(10)))
    second, covered = find_prefix(manager, [*range(8), 77, 78], ROOT)
    assert covered == 8
    assert second.blocks[0] == first.blocks[0][:2]
    assert cached_prefix(manager, [*range(8), 77, 78], ROOT) == 8
    assert counts(manager) == (5, 0, 3)
    first.free()
    assert counts(manager) == (6, 0, 2), "what the second holds is not to be evicted"


def test_another_root_shares_nothing():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    computed(manager, list(range(8)))
    salted = root_identity("model", "fp32", "tenant")
    assert cached_prefix(manager, list(range(8)), salted) == 0


def test_equal_blocks_after_different_prefixes_differ():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    assert cached_prefix(manager, [5, 5, 5, 5], ROOT) == 0
    assert cached_prefix(manager, [2, 2, 2, 2, 5, 5, 5, 5], ROOT) == 0


def test_a_wholly_cached_prompt_copies_its_last_block_on_write():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    first = computed(manager, list(range(8)))
    second, covered = find_prefix(manager, list(range(8)), ROOT)
    assert covered == 7
    assert second.blocks[0] == first.blocks[0]
    assert second.needs(7, 8) == [1]
    second.grow(7, 8)
    assert manager.pool.copies == [(0, first.blocks[0][1], second.blocks[0][1])]
    assert second.blocks[0][1] != first.blocks[0][1]
    assert second.blocks[0][0] == first.blocks[0][0]
    second.publish(list(range(8)), 8)
    third, _ = find_prefix(manager, list(range(8)), ROOT, compute_last=False)
    assert third.blocks[0] == first.blocks[0], "the earlier copy stays the cached one"


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_copied_block_holds_the_draft_kv_that_its_source_holds(is_drafted):
    """A copy's content is the source's, both segments. A block that had draft KV before may be the target."""
    manager = BlockManager(FakePool(BLOCK_SIZE, 4))
    tokens = list(range(8))
    first = computed(manager, tokens)
    if is_drafted:
        first.mark_drafted(8)
    table, covered = find_prefix(manager, tokens, ROOT)
    table.grow(covered, 8)
    assert len(manager.pool.copies) == 1
    assert table.num_drafted == (8 if is_drafted else 0)


def test_without_compute_last_everything_cached_counts():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    computed(manager, list(range(8))).free()
    table, covered = find_prefix(manager, list(range(8)), ROOT, compute_last=False)
    assert covered == 8
    assert counts(manager) == (6, 0, 2)
    table.grow(8, 9)
    assert manager.pool.copies == []


def test_an_empty_sequence_covers_nothing():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    assert find_prefix(manager, [], ROOT)[1] == 0


def test_the_partial_block_is_never_published():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    table = computed(manager, list(range(7)))
    assert len(table.identities) == 1
    table.free()
    assert counts(manager) == (7, 1, 0)


def test_uncommitted_tokens_are_not_published():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    table, _ = find_prefix(manager, list(range(12)), ROOT)
    table.grow(0, 12)
    table.publish(list(range(12)), 7)
    assert cached_prefix(manager, list(range(12)), ROOT) == 4


def test_a_published_block_is_copied_even_by_its_only_holder():
    manager = BlockManager(FakePool(BLOCK_SIZE, 8))
    table = computed(manager, list(range(8)))
    old = list(table.blocks[0])
    table.grow(4, 8)
    assert manager.pool.copies == [(0, old[1], table.blocks[0][1])]
    assert len(table.identities) == 1
    assert cached_prefix(manager, list(range(8)), ROOT) == 8
    assert counts(manager) == (5, 1, 2)


def test_out_of_blocks_changes_nothing():
    manager = BlockManager(FakePool(BLOCK_SIZE, 3))
    computed(manager, list(range(8)))
    other, _ = find_prefix(manager, list(range(8)), ROOT)
    before = (list(other.blocks[0]), list(other.identities), counts(manager))
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are needed, 1 are available"):
        other.grow(7, 9)
    assert (other.blocks[0], other.identities, counts(manager)) == before
    assert cached_prefix(manager, list(range(8)), ROOT) == 8


def test_eviction_takes_the_least_recently_used_tail_first():
    manager = BlockManager(FakePool(BLOCK_SIZE, 4))
    old, young = [1] * 8, [2] * 8
    computed(manager, old).free()
    computed(manager, young).free()
    find_prefix(manager, old, ROOT)[0].free()
    assert counts(manager) == (0, 4, 0)
    table, _ = find_prefix(manager, [3] * 4, ROOT)
    cached = []
    for num_tokens in (4, 8, 12, 16):
        table.grow(num_tokens - 4, num_tokens)
        cached.append((cached_prefix(manager, old, ROOT), cached_prefix(manager, young, ROOT)))
    assert cached == [(8, 4), (8, 0), (4, 0), (0, 0)]


def test_free_is_idempotent():
    manager = BlockManager(FakePool(BLOCK_SIZE, 4))
    table = computed(manager, list(range(8)))
    table.free()
    table.free()
    assert counts(manager) == (2, 2, 0)


def test_without_prefix_caching_nothing_is_kept():
    manager = BlockManager(FakePool(BLOCK_SIZE, 4), enable_prefix_caching=False)
    table = computed(manager, list(range(8)))
    assert cached_prefix(manager, list(range(8)), ROOT) == 0
    table.free()
    assert counts(manager) == (4, 0, 0)
