"""The host tier's memory: slots of one block each, and the copies between them and the device pool."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.kv.host_memory import host_zeros

_CHUNK_BYTES = 256 << 20
"""Of pinned memory. What is asked for torch rounds up to a power of two, so as one chunk it could be twice as
much."""


class HostMemory:
    """`num_slots` slots, each as large as one block of `pool`, a tensor [num_blocks, ...] on any device.

    On a CPU a copy is done when the call returns. On CUDA it is queued in the current stream, from or to
    pinned memory. So it runs after the forward that wrote the block and before the one that reads or
    overwrites it, and this thread does not wait.
    """

    def __init__(self, pool: Tensor, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks = pool.view(pool.shape[0], -1).view(torch.uint8)
        self.block_bytes = self._blocks.shape[1]
        self._on_cuda = pool.is_cuda
        self._chunks = _allocate(num_slots, self.block_bytes, pool.is_cuda)
        self._queued: dict[int, torch.cuda.Event] = {}

    def save(self, block: int, slot: int) -> None:
        """Device to host."""
        self._copy(self._slot(slot), self._blocks[block], slot)

    def load(self, slot: int, block: int) -> None:
        """Host to device."""
        self._copy(self._blocks[block], self._slot(slot), slot)

    def buffer(self, slot: int) -> memoryview:
        """The slot's bytes, once the copies queued for it are done. Any thread may call it."""
        event = self._queued.pop(slot, None)
        if event is not None:
            event.synchronize()
        return memoryview(self._slot(slot).numpy())

    def finish(self) -> None:
        """Wait for all copies, before anything but this thread's forwards uses the device pool."""
        if self._on_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()

    def _slot(self, slot: int) -> Tensor:
        chunk, place = divmod(slot, len(self._chunks[0]))
        return self._chunks[chunk][place]

    def _copy(self, target: Tensor, source: Tensor, slot: int) -> None:
        if not self._on_cuda:
            # One thread is about as fast as torch's several, which wait for one another on busy cores.
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._blocks.device))
            self._queued[slot] = event


def _allocate(num_slots: int, block_bytes: int, pinned: bool) -> list[Tensor]:
    """The slots in order, in chunks uint8 [slots, block_bytes]. All chunks but the last are equally large."""
    if not pinned:
        return [host_zeros(num_slots * block_bytes).view(num_slots, block_bytes)]
    most = max(1, _CHUNK_BYTES // block_bytes)
    sizes = [min(most, num_slots - first) for first in range(0, num_slots, most)]
    return [torch.empty((slots, block_bytes), dtype=torch.uint8, pin_memory=True) for slots in sizes]
