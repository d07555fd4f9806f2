"""A pool in a GPU's memory: if the transport can't read it, its blocks are copied through pinned host memory.

Copies run on a stream of their own, after everything that was launched before on the device's default stream.
So a step's results are complete before they are copied, and no kernel still reads a block that a copy
overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pinned(nbytes: int, device: torch.device) -> memoryview:
    """Host memory that the device copies from and to at full speed."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return memoryview(memory.numpy())


@contextmanager
def in_order(device: torch.device) -> Iterator[None]:
    """Context for copies in any thread: they run after all that was launched, and are done at its end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def settle(blocks: Tensor | None) -> None:
    """Wait for everything launched so far that may use the device's pool; does nothing without a device."""
    if blocks is not None:
        with in_order(blocks.device):
            pass


class BlockGatherer:
    """Brings blocks of a device pool, uint8 [num_blocks, block_bytes], to the host. For one thread."""

    def __init__(self, blocks: Tensor, max_blocks: int) -> None:
        self._blocks = blocks
        self._block_bytes = blocks.shape[1]
        self._host = pinned(max_blocks * self._block_bytes, blocks.device)

    def gather(self, block_ids: npt.NDArray[np.int64]) -> memoryview:
        """The blocks, packed in that order; valid until the next call."""
        view = self._host[: len(block_ids) * self._block_bytes]
        if not len(block_ids):
            return view
        target = torch.frombuffer(view, dtype=torch.uint8).view(len(block_ids), self._block_bytes)
        with in_order(self._blocks.device):
            index = torch.from_numpy(block_ids).to(self._blocks.device)
            target.copy_(self._blocks.index_select(0, index), non_blocking=True)
        return view
