"""Puts a step's arrays on the device: all in one copy, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


class Uploader:
    """The tensors lie at the same addresses whenever arrays of the same sizes are uploaded, and hold until
    the next upload.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self._copied: torch.cuda.Event | None = None

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        self.reserve(ends[-1])
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before, which has ended
        tensors = []
        for array, start in zip(arrays, [0, *ends], strict=False):
            part = slice(start, start + array.nbytes)
            self._host[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = torch.from_numpy(array[:0]).dtype
            tensors.append(self._bytes[part].view(dtype).view(array.shape))
        self._bytes[: ends[-1]].copy_(self._pinned[: ends[-1]], non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return tensors

    def reserve(self, nbytes: int) -> None:
        """Have room for so much in every upload: while that suffices, addresses stay."""
        if nbytes > len(self._bytes):
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._host = self._pinned.numpy()
