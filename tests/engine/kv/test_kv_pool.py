"""A pool's memory: its blocks, layers and segments, its size, and pinned memory on the host."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from engine import copies
from engine.copies import HugePages
from engine.kv.layout import DRAFT, TARGET, Group, LayerPlace, LayerShape, PoolLayout, Segment
from engine.kv.pool import KVPool, pool_blocks
from engine.kv.sequence_blocks import HandoffLayout
from engine.kv.tiers import host as host_tier
from engine.kv.tiers.host import HostMemory
from protocol.config import ServeConfig

NUM_BLOCKS, BLOCK_SIZE = 12, 4
TABLE = [7, 2, 9, 4, 0]
LIKE, WIDE_KEYS = LayerShape(2, 8, 8), LayerShape(1, 12, 4)
UNLIKE = Group.of_layers(TARGET, [LIKE, WIDE_KEYS, LIKE, 0], torch.float32)
"""The second layer's values differ in size from its keys, and the last layer shares the first one's KV."""
LAYOUT = PoolLayout((UNLIKE, Group.uniform(DRAFT, Segment(1, 1, 4, torch.bfloat16))), BLOCK_SIZE)
NAMES = [TARGET, f"{TARGET}.1", f"{TARGET}.2", DRAFT]


@pytest.fixture
def pool() -> KVPool:
    pool = KVPool(LAYOUT, NUM_BLOCKS, torch.device("cpu"), None)
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        segment = pool.segment(name)
        segment.copy_(torch.randn(segment.shape, generator=generator))
    return pool


def at(segment: Tensor, place: int) -> Tensor:
    return segment[TABLE[place // BLOCK_SIZE], :, :, place % BLOCK_SIZE]


def test_a_block_contains_its_segments_in_order(pool: KVPool) -> None:
    for block in range(NUM_BLOCKS):
        parts = [pool.segment(name)[block].contiguous().view(torch.uint8).flatten() for name in NAMES]
        assert torch.equal(pool.memory[block], torch.cat(parts))
    assert pool.memory.is_contiguous()
    assert pool.num_bytes == NUM_BLOCKS * (2 * 2 * 4 * 2 * 8 * 4 + 4 * 12 * 4 + 4 * 4 * 4 + 2 * 4 * 4 * 2)
    assert pool.token_bytes * NUM_BLOCKS * BLOCK_SIZE == pool.num_bytes
    assert [info.name for info in pool.segments] == NAMES
    assert [info.shape for info in pool.segments] == [
        (2, 2, 4, 2, 8),
        (1, 1, 4, 1, 12),
        (1, 1, 4, 1, 4),
        (1, 2, 4, 1, 4),
    ]


def test_layers_are_views_of_their_places(pool: KVPool) -> None:
    first, second, third, shared = pool.layers(TARGET)
    assert torch.equal(first.keys, pool.segment(TARGET)[:, 0, 0])
    assert torch.equal(first.values, pool.segment(TARGET)[:, 0, 1])
    assert torch.equal(second.keys, pool.segment(f"{TARGET}.1")[:, 0, 0])
    assert torch.equal(second.values, pool.segment(f"{TARGET}.2")[:, 0, 0])
    assert second.keys.shape == (NUM_BLOCKS, BLOCK_SIZE, 1, 12)
    assert second.values.shape == (NUM_BLOCKS, BLOCK_SIZE, 1, 4)
    assert torch.equal(third.keys, pool.segment(TARGET)[:, 1, 0])
    assert [side.values.data_ptr() for side in shared.sides] == [
        side.values.data_ptr() for side in first.sides
    ]
    third.values[5].fill_(9.0)
    assert (pool.segment(TARGET)[5, 1, 1] == 9.0).all()


def test_layers_of_one_shape_lie_together() -> None:
    places = (LayerPlace(0, 0), LayerPlace(1, 0, 2), LayerPlace(0, 1), LayerPlace(0, 0))
    assert UNLIKE.layers == places
    segments = Segment(2, 2, 8, torch.float32), *WIDE_KEYS.segments(1, torch.float32)
    assert UNLIKE.segments == segments
    assert UNLIKE.num_values == 2 * LIKE.num_values + WIDE_KEYS.num_values == 2 * 32 + 16
    plain = Group.of_layers(TARGET, [LIKE] * 3, torch.float32)
    assert plain == Group.uniform(TARGET, Segment(3, 2, 8, torch.float32))


def test_values_within_keys_take_no_room() -> None:
    latent = LayerShape(1, 12, 8, values_in_keys=True)
    group = Group.of_layers(TARGET, [LIKE, latent, None, latent], torch.float32)
    assert group.segments[1:] == (Segment(2, 1, 12, torch.float32, num_planes=1),)
    assert group.num_values == LIKE.num_values + 2 * latent.num_values == 32 + 2 * 12
    assert Group.of_layers(TARGET, [None, latent], torch.float32).layers[0] == LayerPlace(0, 0, value_dim=8)
    pool = KVPool(PoolLayout((group,), BLOCK_SIZE), NUM_BLOCKS, torch.device("cpu"), None)
    kept = pool.layers(TARGET)[3]
    assert kept.values_in_keys
    kept.keys[7, 2] = torch.arange(12.0)
    assert kept.values[7, 2].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    assert pool.segment(f"{TARGET}.1")[7, 1, 0, 2, 0, 11] == 11.0
    assert not pool.layers(TARGET)[0].values_in_keys


def test_formats_of_different_shapes_have_different_names() -> None:
    plain = Segment(3, 2, 8, torch.float32)
    assert Group.uniform(TARGET, plain).describe(16) == "float32/3x2x8/16"
    assert len({group.describe(16) for group in (Group.uniform(TARGET, plain), *LAYOUT.groups)}) == 3


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize(
    "places", [[], [0], [0, 1, 2], [1], [5], [0, 3], [0, 1, 9], [2, 3, 4, 5, 6], [1, 2, 4, 8, 13]], ids=str
)
def test_moved_tokens_are_whole_in_every_segment(pool: KVPool, first: int, places: list[int]) -> None:
    before = {name: pool.segment(name).clone() for name in NAMES}
    pool.move_tokens([TABLE], first, places)
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
    before = {name: pool.segment(name).clone() for name in NAMES}
    pool.copy_block(7, 3)
    pool.copy_block(3, 5)
    for name, old in before.items():
        old[[3, 5]] = old[7].clone()
        assert torch.equal(pool.segment(name), old)


GIB = 2**30
PER_TOKEN = Segment(8, 4, 32, torch.bfloat16)
"""4 KiB of KV per token."""


def blocks_for(device: str = "cpu", max_model_len: int = 1024, kept_free: int = 0, **options: Any) -> int:
    config = ServeConfig(model="none", **options)
    layout = PoolLayout((Group.uniform(TARGET, PER_TOKEN),), config.block_size)
    return pool_blocks(config, layout, torch.device(device), max_model_len, kept_free=kept_free)


@pytest.mark.parametrize(
    ("free", "reserved", "utilization", "kept_free", "expected"),
    [(5, 16, 0.9, 0, 5), (60, 10, 0.5, 2, 28), (28, 16, 0.45, 0, 20)],
    ids=["no more than is free", "room for steps stays", "another worker has its share"],
)
def test_a_gpu_pool(
    free: int,
    reserved: int,
    utilization: float,
    kept_free: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = [3]  # what loading has freed, but torch still has
    monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((free - sum(cached)) * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (reserved + sum(cached)) * GIB)
    options: dict[str, Any] = {"gpu_memory_utilization": utilization, "kept_free": kept_free * GIB}
    assert blocks_for("cuda", **options) * 16 * 4096 == expected * GIB


@pytest.mark.parametrize(
    ("available", "max_model_len", "nbytes", "why"),
    [
        (64 * GIB, 1024, 8 * (1024 + 16) * 4096, "room for 8 sequences of 1024 tokens"),
        (64 * GIB, 131072, 4 * GIB, "the most that a CPU worker takes by default"),
        (8 * GIB, 131072, int(8 * GIB * 0.9 / 2), "half of --gpu-memory-utilization 0.9 of the free memory"),
    ],
)
def test_a_cpu_pool_fits_the_model_and_the_machine(
    available: int,
    max_model_len: int,
    nbytes: int,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = SimpleNamespace(total=64 * GIB, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with caplog.at_level("DEBUG", "tandem.engine"):
        assert blocks_for(max_model_len=max_model_len, max_num_seqs=8) == nbytes // (16 * 4096)
    assert why in caplog.text


@pytest.mark.parametrize(("state_blocks", "places"), [(None, 33), (3, (3 + 3) * 16)])
def test_a_handed_over_state_takes_whole_blocks_after_those_of_the_tokens(
    state_blocks: int | None, places: int
) -> None:
    pool: Any = SimpleNamespace(block_size=16, state_blocks=state_blocks)
    state: Any = None if state_blocks is None else SimpleNamespace()
    assert HandoffLayout(pool, [], state).num_places(33) == places


def test_tensors_lie_side_by_side() -> None:
    pages = HugePages()
    tensors = [torch.arange(count, dtype=torch.int16).view(3, -1) for count in (3, 300, 96)]
    copies = [pages.copy(tensor) for tensor in tensors]
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    first, second, third = (copy.data_ptr() for copy in copies)
    assert (second - first, third - second) == (64, 640)
    assert pages.copy(torch.empty(0)).numel() == 0


def test_a_tensor_that_does_not_fit_gets_its_own_room() -> None:
    pages = HugePages(100)
    small = pages.copy(torch.ones(4))
    large = pages.copy(torch.full((copies._PAGE // 4 + 1,), 2.0))
    assert small.eq(1).all() and large.eq(2).all()
    assert torch.equal(pages.copy(torch.full((5,), 3.0)), torch.full((5,), 3.0))


def test_pinned_slots_take_little_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to a power of two."""
    num_slots, block_bytes, pinned = 350, 3 * 1024, 0
    empty, allocate = torch.empty, host_tier._allocate

    def counted(*shape: Any, pin_memory: bool, **options: Any) -> Tensor:
        nonlocal pinned
        tensor = empty(*shape, **options)
        pinned += 1 << (tensor.nbytes - 1).bit_length()
        return tensor.zero_()

    monkeypatch.setattr(host_tier, "_CHUNK_BYTES", 64 * 1024)
    monkeypatch.setattr(host_tier, "_allocate", lambda slots, nbytes, _: allocate(slots, nbytes, True))
    pool = torch.arange(num_slots).unsqueeze(1).repeat(1, block_bytes // 8)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        memory = HostMemory(pool, num_slots)
    assert pinned <= 1.07 * num_slots * block_bytes
    for slot in range(num_slots):
        memory.save(num_slots - 1 - slot, slot)
    pool.zero_()
    for slot in range(num_slots):
        assert bytes(memory.buffer(slot)) == (num_slots - 1 - slot).to_bytes(8, "little") * len(pool[0])
        memory.load(slot, slot)
    assert torch.equal(pool[:, -1], torch.arange(num_slots - 1, -1, -1))
