"""The block manager's single rules, one by one."""

import pytest

from engine.block_manager import BlockCopy, BlockManager, OutOfBlocksError
from protocol.ids import root_identity
from tests.engine.cached_prefix import cached_prefix

BLOCK_SIZE = 4
ROOT = root_identity("model", "fp32")


def computed(manager: BlockManager, token_ids: list[int]):
    """A table whose tokens are all written and published."""
    table, covered = manager.start(token_ids, ROOT)
    manager.grow(table, covered, len(token_ids))
    manager.publish(table, token_ids, len(token_ids))
    return table


def counts(manager: BlockManager) -> tuple[int, int, int]:
    assert manager.num_available == manager.num_free + manager.num_cached
    return manager.num_free, manager.num_cached, manager.num_blocks - manager.num_available


def test_a_fresh_pool_is_all_free():
    assert counts(BlockManager(8, BLOCK_SIZE)) == (8, 0, 0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (-1, 4), (4, 0)])
def test_sizes_must_be_positive(num_blocks, block_size):
    with pytest.raises(ValueError, match="must be positive"):
        BlockManager(num_blocks, block_size)


def test_grow_takes_blocks_only_when_needed():
    manager = BlockManager(8, BLOCK_SIZE)
    table, covered = manager.start(list(range(6)), ROOT)
    assert (table.block_ids, covered) == ([], 0)
    assert manager.blocks_needed(table, 0, 6) == 2
    assert manager.grow(table, 0, 6) == []
    assert table.block_ids == [0, 1]
    assert manager.blocks_needed(table, 6, 8) == 0
    manager.grow(table, 6, 8)
    assert table.block_ids == [0, 1]
    manager.grow(table, 8, 9)
    assert table.block_ids == [0, 1, 2]


def test_new_blocks_are_adjacent_where_they_can_be():
    manager = BlockManager(16, BLOCK_SIZE)
    first, _ = manager.start([0] * 20, ROOT)
    manager.grow(first, 0, 20)
    manager.free(first)
    second, _ = manager.start([0] * 40, ROOT)
    manager.grow(second, 0, 40)
    assert second.block_ids == list(range(10))


def test_full_blocks_of_an_equal_prefix_are_shared():
    manager = BlockManager(8, BLOCK_SIZE)
    first = computed(manager, list(range(10)))
    second, covered = manager.start([*range(8), 77, 78], ROOT)
    assert covered == 8
    assert second.block_ids == first.block_ids[:2]
    assert cached_prefix(manager, [*range(8), 77, 78], ROOT) == 8
    assert counts(manager) == (5, 0, 3)


def test_another_root_shares_nothing():
    manager = BlockManager(8, BLOCK_SIZE)
    computed(manager, list(range(8)))
    salted = root_identity("model", "fp32", "tenant")
    assert cached_prefix(manager, list(range(8)), salted) == 0


def test_equal_blocks_after_different_prefixes_differ():
    manager = BlockManager(8, BLOCK_SIZE)
    computed(manager, [1, 1, 1, 1, 5, 5, 5, 5])
    assert cached_prefix(manager, [5, 5, 5, 5], ROOT) == 0
    assert cached_prefix(manager, [2, 2, 2, 2, 5, 5, 5, 5], ROOT) == 0


def test_a_wholly_cached_prompt_copies_its_last_block_on_write():
    manager = BlockManager(8, BLOCK_SIZE)
    first = computed(manager, list(range(8)))
    second, covered = manager.start(list(range(8)), ROOT)
    assert covered == 7
    assert second.block_ids == first.block_ids
    assert manager.blocks_needed(second, 7, 8) == 1
    copies = manager.grow(second, 7, 8)
    assert copies == [BlockCopy(first.block_ids[1], second.block_ids[1])]
    assert second.block_ids[1] != first.block_ids[1]
    assert second.block_ids[0] == first.block_ids[0]
    manager.publish(second, list(range(8)), 8)
    third, _ = manager.start(list(range(8)), ROOT, compute_last=False)
    assert third.block_ids == first.block_ids, "the earlier copy stays the cached one"


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_copied_block_holds_the_draft_kv_that_its_source_holds(is_drafted):
    """A copy's content is the source's, both segments. A block that had draft KV before may be the target."""
    manager = BlockManager(4, BLOCK_SIZE)
    tokens = list(range(8))
    first = computed(manager, tokens)
    if is_drafted:
        manager.mark_drafted(first, 8)
    table, covered = manager.start(tokens, ROOT)
    assert len(manager.grow(table, covered, 8)) == 1
    assert manager.num_drafted(table) == (8 if is_drafted else 0)


def test_without_compute_last_everything_cached_counts():
    manager = BlockManager(8, BLOCK_SIZE)
    manager.free(computed(manager, list(range(8))))
    table, covered = manager.start(list(range(8)), ROOT, compute_last=False)
    assert covered == 8
    assert counts(manager) == (6, 0, 2)
    assert manager.grow(table, 8, 9) == []


def test_an_empty_sequence_covers_nothing():
    manager = BlockManager(8, BLOCK_SIZE)
    assert manager.start([], ROOT)[1] == 0


def test_the_partial_block_is_never_published():
    manager = BlockManager(8, BLOCK_SIZE)
    table = computed(manager, list(range(7)))
    assert len(table.identities) == 1
    manager.free(table)
    assert counts(manager) == (7, 1, 0)


def test_uncommitted_tokens_are_not_published():
    manager = BlockManager(8, BLOCK_SIZE)
    table, _ = manager.start(list(range(12)), ROOT)
    manager.grow(table, 0, 12)
    manager.publish(table, list(range(12)), 7)
    assert cached_prefix(manager, list(range(12)), ROOT) == 4


def test_a_published_block_is_copied_even_by_its_only_holder():
    manager = BlockManager(8, BLOCK_SIZE)
    table = computed(manager, list(range(8)))
    old = list(table.block_ids)
    assert manager.grow(table, 4, 8) == [BlockCopy(old[1], table.block_ids[1])]
    assert len(table.identities) == 1
    assert cached_prefix(manager, list(range(8)), ROOT) == 8
    assert counts(manager) == (5, 1, 2)


def test_out_of_blocks_changes_nothing():
    manager = BlockManager(3, BLOCK_SIZE)
    computed(manager, list(range(8)))
    other, _ = manager.start(list(range(8)), ROOT)
    before = (list(other.block_ids), list(other.identities), counts(manager))
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are needed, 1 are available"):
        manager.grow(other, 7, 9)
    assert (other.block_ids, other.identities, counts(manager)) == before
    assert cached_prefix(manager, list(range(8)), ROOT) == 8


def test_eviction_takes_the_least_recently_used_tail_first():
    manager = BlockManager(4, BLOCK_SIZE)
    old, young = [1] * 8, [2] * 8
    manager.free(computed(manager, old))
    manager.free(computed(manager, young))
    manager.free(manager.start(old, ROOT)[0])
    assert counts(manager) == (0, 4, 0)
    table, _ = manager.start([3] * 4, ROOT)
    cached = []
    for num_tokens in (4, 8, 12, 16):
        manager.grow(table, num_tokens - 4, num_tokens)
        cached.append((cached_prefix(manager, old, ROOT), cached_prefix(manager, young, ROOT)))
    assert cached == [(8, 4), (8, 0), (4, 0), (0, 0)]


def test_free_is_idempotent():
    manager = BlockManager(4, BLOCK_SIZE)
    table = computed(manager, list(range(8)))
    manager.free(table)
    manager.free(table)
    assert counts(manager) == (2, 2, 0)


def test_without_prefix_caching_nothing_is_kept():
    manager = BlockManager(4, BLOCK_SIZE, enable_prefix_caching=False)
    table = computed(manager, list(range(8)))
    assert cached_prefix(manager, list(range(8)), ROOT) == 0
    manager.free(table)
    assert counts(manager) == (4, 0, 0)
