"""Long-lived tensors are moved side by side onto whole pages and keep their values."""

from __future__ import annotations

import torch

from engine.kv import host_memory
from engine.kv.host_memory import HugePages


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
    large = pages.copy(torch.full((host_memory._PAGE // 4 + 1,), 2.0))
    assert small.eq(1).all() and large.eq(2).all()
    assert torch.equal(pages.copy(torch.full((5,), 3.0)), torch.full((5,), 3.0))
