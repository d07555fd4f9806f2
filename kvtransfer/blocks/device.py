"""Pools in a GPU's memory: when their blocks are complete, and copies through pinned host memory.

The engine launches work without waiting for it. Blocks that it hands over may not be computed yet, and blocks
that it frees may still be read by work launched earlier. So each push and each lease has a mark in the
device's stream: readers and writers of the blocks wait for that mark, and not for later work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.blocks.extents import BufferViews
from kvtransfer.blocks.layout import JoinedBlocks

SLICE_BYTES = 2 * 1024 * 1024
"""Bytes of a slice of a copy to the host: a slice is sent while the next one is copied."""


class StreamMark:
    """A point in the work of a stream. Without a stream (host memory) all work is done."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event = torch.cuda.Event(blocking=True) if stream is not None else None
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """Wait until all work launched before the mark is done. For any thread."""
        if self._event is not None:
            self._event.synchronize()


PAST = StreamMark()


class Copies:
    """Copies in streams of their own, one per device, which wait for no other work. Host memory has no
    stream.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    def start(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        """Start to copy the tensor that `source` returns; `source` may compute it on the first device."""
        with _in(self._streams):
            target.copy_(source(), non_blocking=True)

    def mark(self) -> StreamMark:
        return StreamMark(*self._streams[:1])

    @property
    def stream(self) -> int:
        """The first stream, as CUDA's driver names it; 0 in host memory."""
        return int(self._streams[0].cuda_stream) if self._streams else 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """Complete all copies that the calling thread launches in the context, at the end of the context."""
        try:
            with _in(self._streams):
                yield
        finally:  # also after an error: the caller then frees the blocks
            for stream in self._streams:
                stream.synchronize()


@contextmanager
def _in(streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Make each stream the current one of its device, and the first stream's device the current device."""
    with ExitStack() as entered:
        for stream in reversed(streams):
            entered.enter_context(torch.cuda.stream(stream))
        yield


class Queue:
    """The work launched on a pool's `device`. In host memory (None) a call returns when its work is done.
    Blocks may also be on `others`: work on `device` follows work on these.
    """

    def __init__(self, device: torch.device | None = None, others: Sequence[torch.device] = ()) -> None:
        self._device, self._others = device, others

    def mark(self) -> StreamMark:
        """Return a mark after the work that the calling thread has launched on its current stream."""
        return PAST if self._device is None else StreamMark(torch.cuda.current_stream(self._device))

    def copies(self) -> Copies:
        devices = [] if self._device is None else [self._device, *self._others]
        return Copies([torch.cuda.Stream(device) for device in devices])


HOST = Queue()


def queue_of(device: torch.device, others: Sequence[torch.device] = ()) -> Queue:
    return Queue(device, others) if device.type == "cuda" else HOST


def pinned(nbytes: int, device: torch.device) -> memoryview:
    """Allocate host memory that the device reads and writes at full speed."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return memoryview(memory.numpy())


class ArrivingViews(BufferViews):
    """Slices of a buffer that arrive in order. Access to a slice waits for its arrival."""

    def __init__(self, buffer: memoryview, ends: list[int], marks: list[StreamMark]) -> None:
        super().__init__(buffer, [0, *ends[:-1]], ends)
        self._marks = marks

    def __getitem__(self, index: slice) -> list[memoryview]:
        for last in self._marks[index][-1:]:
            last.wait()
        return super().__getitem__(index)


class BlockGatherer:
    """A copier of blocks of a device's pool, uint8 [num_blocks, block_bytes], to the host. For one thread."""

    def __init__(self, blocks: Tensor | JoinedBlocks, queue: Queue, max_blocks: int) -> None:
        self._blocks = blocks
        self._block_bytes = blocks.shape[1]
        self._copies = queue.copies()
        self.buffer = pinned(max_blocks * self._block_bytes, blocks.device)
        self._host = torch.frombuffer(self.buffer, dtype=torch.uint8).view(max_blocks, self._block_bytes)

    def gather(self, block_ids: npt.NDArray[np.int64]) -> ArrivingViews:
        """Start to copy the blocks, in this order, into `buffer`; the result is valid until the next call."""
        most = max(1, SLICE_BYTES // self._block_bytes)
        ends: list[int] = []
        marks: list[StreamMark] = []
        for start in range(0, len(block_ids), most):
            part = block_ids[start : start + most]
            for first, last in _runs(part):
                run = slice(int(part[first]), int(part[last - 1]) + 1)
                target = self._host[start + first : start + last]
                self._copies.start(target, partial(self._blocks.__getitem__, run))
            marks.append(self._copies.mark())
            ends.append((start + len(part)) * self._block_bytes)
        return ArrivingViews(self.buffer, ends, marks)


def _runs(block_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the index ranges [first, last) of consecutive blocks."""
    firsts = np.flatnonzero(np.diff(block_ids, prepend=-2) != 1).tolist()
    return list(zip(firsts, [*firsts[1:], len(block_ids)], strict=True))
