"""A pool of two segments: one extent a block, tokens and blocks that move in both, tiers that keep both."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kv_pool import DRAFT, TARGET, KVPool, KVShape
from engine.tiers.memory import HostMemory

NUM_BLOCKS, BLOCK_SIZE = 12, 4
TABLE = [7, 2, 9, 4, 0]
SHAPES = {TARGET: KVShape(3, 2, 8, torch.float32), DRAFT: KVShape(1, 1, 4, torch.bfloat16)}


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(SHAPES, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0)
    for name in SHAPES:
        segment = pool.segment(name)
        segment.copy_(torch.randn(segment.shape, generator=generator))
    return pool


def at(segment: Tensor, place: int) -> Tensor:
    return segment[TABLE[place // BLOCK_SIZE], :, :, place % BLOCK_SIZE]


def test_a_block_is_its_segments_one_after_the_other(pool: KVPool) -> None:
    for block in range(NUM_BLOCKS):
        parts = [pool.segment(name)[block].contiguous().view(torch.uint8).flatten() for name in SHAPES]
        assert torch.equal(pool.blocks[block], torch.cat(parts))
    assert pool.blocks.is_contiguous()
    assert pool.num_bytes == NUM_BLOCKS * (3 * 2 * 4 * 2 * 8 * 4 + 1 * 2 * 4 * 1 * 4 * 2)


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize(
    "places", [[], [0], [0, 1, 2], [1], [5], [0, 3], [0, 1, 9], [2, 3, 4, 5, 6], [1, 2, 4, 8, 13]], ids=str
)
def test_moved_tokens_are_whole_in_every_segment(pool: KVPool, first: int, places: list[int]) -> None:
    before = {name: pool.segment(name).clone() for name in SHAPES}
    pool.move_tokens(TABLE, first, places)
    for name, old in before.items():
        expected = old.clone()
        for i, place in enumerate(places):
            at(expected, first + i).copy_(at(old, first + place))
        assert torch.equal(pool.segment(name), expected)


def test_moves_between_random_places(pool: KVPool) -> None:
    rng = random.Random(1)
    for _ in range(20):
        test_moved_tokens_are_whole_in_every_segment(pool, rng.randrange(4), sorted(rng.sample(range(16), 5)))


def test_copied_blocks_are_whole(pool: KVPool) -> None:
    before = {name: pool.segment(name).clone() for name in SHAPES}
    pool.copy_blocks([(7, 3), (3, 5)])
    for name, old in before.items():
        old[[3, 5]] = old[7].clone()
        assert torch.equal(pool.segment(name), old)


def test_the_host_tier_keeps_both_segments(pool: KVPool) -> None:
    before = {name: pool.segment(name)[2].clone() for name in SHAPES}
    memory = HostMemory(pool.blocks, 2)
    memory.save(2, 1)
    pool.blocks[2].zero_()
    memory.load(1, 11)
    for name, old in before.items():
        assert torch.equal(pool.segment(name)[11], old)
        assert not pool.segment(name)[2].any()
