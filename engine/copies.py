"""Host memory, and copies between host and device, one for each step in each direction.

The host does not wait for a step's arrays to reach the device. All that it waits for are a step's results.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Upload = Callable[[Sequence[np.ndarray]], list[Tensor]]

ALIGNMENT = 16
"""Alignment of tensors in bytes. Triton compiles kernels again for tensors of another alignment."""


def upload_to(device: torch.device) -> Upload:
    """Return the upload for a device. On the CPU tensors share the arrays' memory."""
    return _views_of if device.type == "cpu" else Uploader(device)


def _views_of(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


class Pinned(NamedTuple):
    buffer: Tensor
    bytes: np.ndarray
    """A view of the buffer's memory."""
    copied: torch.cuda.Event
    """The event recorded after the buffer's latest copy."""


class Uploader:
    """An upload of several arrays in one copy. Arrays of the same sizes always get tensors at the same
    addresses. The tensors are valid until the next upload.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._pinned: deque[Pinned] = deque()
        self._layout: list[tuple[np.dtype, tuple[int, ...]]] = []
        self._parts: list[slice] = []
        self._tensors: list[Tensor] = []
        """The tensors of the layout, made again only when the layout changes."""

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        layout = [(array.dtype, array.shape) for array in arrays]
        if layout != self._layout:
            self._lay_out(layout, arrays)
        pinned = self._free_buffer()
        for part, array in zip(self._parts, arrays, strict=True):
            pinned.bytes[part] = array.reshape(-1).view(np.uint8)
        end = self._parts[-1].stop
        self._bytes[:end].copy_(pinned.buffer[:end], non_blocking=True)
        pinned.copied.record()
        return [*self._tensors]

    def _lay_out(self, layout: list[tuple[np.dtype, tuple[int, ...]]], arrays: Sequence[np.ndarray]) -> None:
        starts = [0, *accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]
        if starts[-1] > len(self._bytes):
            self._bytes = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
            self._pinned.clear()
        places = zip(starts, arrays, strict=False)
        self._parts = [slice(start, start + array.nbytes) for start, array in places]
        self._tensors = [
            self._bytes[part].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for part, array in zip(self._parts, arrays, strict=True)
        ]
        self._layout = layout

    def _free_buffer(self) -> Pinned:
        """Return a buffer whose copy is over. The number of buffers follows the steps launched ahead."""
        if not self._pinned or not self._pinned[0].copied.query():
            self._pinned.appendleft(self._new_buffer(len(self._bytes)))
        self._pinned.rotate(-1)
        return self._pinned[-1]

    def _new_buffer(self, nbytes: int) -> Pinned:
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return Pinned(buffer, buffer.numpy(), torch.cuda.Event())


class Downloader:
    """A download of tensors to the host. A result is valid until the second next download begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned, self._other = (torch.empty(0, dtype=torch.uint8) for _ in range(2))

    def __call__(self, values: Tensor) -> Tensor:
        return self.begin(values)()

    def begin(self, values: Tensor) -> Callable[[], Tensor]:
        """Return a function that waits for the values, but not for later work of the device."""
        if self._device.type == "cpu":
            return lambda: values
        self._pinned, self._other = self._other, self._pinned
        if values.nbytes > len(self._pinned):
            self._pinned = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
        host = self._pinned[: values.nbytes].view(values.dtype).view(values.shape)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> Tensor:
            copied.synchronize()
            return host

        return wait


def host_zeros(nbytes: int) -> Tensor:
    """Return zeros, uint8 [nbytes]. Pages are allocated when they are first touched."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
