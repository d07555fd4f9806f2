"""Pools in a GPU's memory: when their bytes are there, and their way through pinned host memory.

An engine launches work and goes on. Blocks that it hands over may not be computed yet, and blocks that it
gives away may still be read by what it launched before. So each push and each lease has a mark in the queue
of what was launched: who reads or writes the blocks waits for that, and not for what came later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.blocks.extents import Views

SLICE_BYTES = 2 * 1024 * 1024
"""Of a copy to the host: what came is sent while the next one comes."""


class Mark(Protocol):
    def wait(self) -> None:
        """Until all that was launched before the mark is done. For any thread."""


class Copies(Protocol):
    """Copies in an order of their own. They wait for nothing."""

    def start(self, target: Tensor, source: Tensor) -> None: ...

    def mark(self) -> Mark:
        """After those that were started."""

    def within(self) -> AbstractContextManager[None]:
        """What the calling thread launches inside is done at the end."""


class Queue(Protocol):
    """What is launched on the device of a pool."""

    def mark(self) -> Mark:
        """After what the calling thread has launched, where it launches now."""

    def copies(self) -> Copies: ...


class _Past:
    def wait(self) -> None:
        return


PAST: Mark = _Past()


class HostQueue:
    """On the host all is done when the call returns."""

    def mark(self) -> Mark:
        return PAST

    def copies(self) -> Copies:
        return _HostCopies()


class _HostCopies:
    def start(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return PAST

    def within(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    def copies(self) -> Copies:
        return _CudaCopies(self._device)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class _CudaCopies:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    @contextmanager
    def within(self) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # after an error, too: whoever gets it gives the blocks away
            self._stream.synchronize()


HOST = HostQueue()


def queue_of(device: torch.device) -> Queue:
    return CudaQueue(device) if device.type == "cuda" else HOST


def pinned(nbytes: int, device: torch.device) -> memoryview:
    """Host memory that the device copies from and to at full speed."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return memoryview(memory.numpy())


class Arriving(Views):
    """Slices of a buffer, the last of which arrives last. Who asks for some waits until they are there."""

    def __init__(self, buffer: memoryview, ends: list[int], marks: list[Mark]) -> None:
        super().__init__(buffer, [0, *ends[:-1]], ends)
        self._marks = marks

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        chosen = self._marks[index]
        asked = chosen if isinstance(chosen, list) else [chosen]
        if asked:
            asked[-1].wait()
        return super().__getitem__(index)


class BlockGatherer:
    """Brings blocks of a device's pool, uint8 [num_blocks, block_bytes], to the host. For one thread."""

    def __init__(self, blocks: Tensor, queue: Queue, max_blocks: int) -> None:
        self._blocks = blocks
        self._block_bytes = blocks.shape[1]
        self._copies = queue.copies()
        self.buffer = pinned(max_blocks * self._block_bytes, blocks.device)
        self._host = torch.frombuffer(self.buffer, dtype=torch.uint8).view(max_blocks, self._block_bytes)

    def gather(self, block_ids: npt.NDArray[np.int64]) -> Arriving:
        """Start to bring the blocks, packed in that order into `buffer`; valid until the next call."""
        most = max(1, SLICE_BYTES // self._block_bytes)
        ends: list[int] = []
        marks: list[Mark] = []
        for start in range(0, len(block_ids), most):
            part = block_ids[start : start + most]
            for first, last in _runs(part):
                run = slice(int(part[first]), int(part[last - 1]) + 1)
                self._copies.start(self._host[start + first : start + last], self._blocks[run])
            marks.append(self._copies.mark())
            ends.append((start + len(part)) * self._block_bytes)
        return Arriving(self.buffer, ends, marks)


def _runs(block_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Places [first, last) of blocks that follow each other."""
    firsts = np.flatnonzero(np.diff(block_ids, prepend=-2) != 1).tolist()
    return list(zip(firsts, [*firsts[1:], len(block_ids)], strict=True))
