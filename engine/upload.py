"""Puts a step's arrays on the device: all in one copy, for which the host does not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Upload = Callable[[Sequence[np.ndarray]], list[Tensor]]

_ALIGNMENT = 16


def upload_to(device: torch.device) -> Upload:
    """On the CPU the arrays' own memory serves."""
    return _views_of if device.type == "cpu" else Uploader(device)


def _views_of(arrays: Sequence[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(array) for array in arrays]


class Pinned(NamedTuple):
    buffer: Tensor
    copied: torch.cuda.Event
    """Recorded behind its latest copy."""


class Uploader:
    """The tensors lie at the same addresses whenever arrays of the same sizes are uploaded, and hold until
    the next upload.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._pinned: deque[Pinned] = deque()

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        self.reserve(ends[-1])
        pinned, copied = self._free_buffer()
        host = pinned.numpy()
        tensors = []
        for array, start in zip(arrays, [0, *ends], strict=False):
            part = slice(start, start + array.nbytes)
            host[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = torch.from_numpy(array[:0]).dtype
            tensors.append(self._bytes[part].view(dtype).view(array.shape))
        self._bytes[: ends[-1]].copy_(pinned[: ends[-1]], non_blocking=True)
        copied.record()
        return tensors

    def reserve(self, nbytes: int) -> None:
        """Have room for so much in every upload: while that suffices, addresses stay."""
        if nbytes > len(self._bytes):
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._pinned.clear()

    def _free_buffer(self) -> Pinned:
        """One whose copy is not under way. There are as many as steps are ever launched ahead."""
        if not self._pinned or not self._pinned[0].copied.query():
            self._pinned.appendleft(self._new_buffer(len(self._bytes)))
        self._pinned.rotate(-1)
        return self._pinned[-1]

    def _new_buffer(self, nbytes: int) -> Pinned:
        return Pinned(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
