"""Host memory for KV blocks, on huge pages where Linux has them: scattered reads are faster there."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


def host_zeros(nbytes: int) -> Tensor:
    """uint8 [nbytes]; pages are allocated when they are first touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
