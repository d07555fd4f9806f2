"""The host tier pins little more memory than it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kv.tiers import host as tier_memory
from engine.kv.tiers.host import HostMemory


def test_pinned_slots_take_little_more_than_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to a power of two."""
    num_slots, block_bytes, pinned = 350, 3 * 1024, 0
    empty, allocate = torch.empty, tier_memory._allocate

    def counted(*shape: Any, pin_memory: bool, **options: Any) -> Tensor:
        nonlocal pinned
        tensor = empty(*shape, **options)
        pinned += 1 << (tensor.nbytes - 1).bit_length()
        return tensor.zero_()

    monkeypatch.setattr(tier_memory, "_CHUNK_BYTES", 64 * 1024)
    monkeypatch.setattr(tier_memory, "_allocate", lambda slots, nbytes, _: allocate(slots, nbytes, True))
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
