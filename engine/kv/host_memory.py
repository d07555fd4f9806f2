"""Host memory for KV blocks and weights, on huge pages if Linux has them: the CPU reads these faster."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def host_zeros(nbytes: int) -> Tensor:
    """Return zeros, uint8 [nbytes]. Pages are allocated when they are first touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


_CHUNK = 64 << 20
"""Bytes mapped at once."""
_PAGE = 2 << 20
"""Bytes of a huge page."""
_LINE = 64
"""Bytes of a cache line. Each tensor begins at one."""


class HugePages:
    """Memory for tensors that are never freed. Small tensors share a huge page."""

    def __init__(self, chunk: int = _CHUNK) -> None:
        """Map `chunk` bytes at once, in whole pages."""
        self._chunk = -(-chunk // _PAGE) * _PAGE
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor in this memory."""
        size = -(-tensor.nbytes // _LINE) * _LINE
        if size > len(self._free):
            self._free = host_zeros(max(size, self._chunk))
        room, self._free = self._free[: tensor.nbytes], self._free[size:]
        return room.view(tensor.dtype).view(tensor.shape).copy_(tensor)
