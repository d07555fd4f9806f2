"""Tensors moved to whole pages keep their values, and the host tier pins little more than it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine import copies
from engine.copies import HugePages
from engine.kv.tiers import host as host_tier
from engine.kv.tiers.host import HostMemory


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
