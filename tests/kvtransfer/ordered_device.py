"""A device that enforces order: its pool's bytes change only when someone waits for the launched work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvtransfer.blocks.device import Copies, Queue, StreamMark
from kvtransfer.blocks.layout import block_bytes
from kvtransfer.interface import RegisteredPool
from protocol.handoff import SegmentInfo

SEGMENT = SegmentInfo(name="target", dtype="float32", shape=(1, 2, 16, 2, 16))
Work = Callable[[], object]


class Launches:
    """An ordered list of work. None of it is done before someone waits for a mark behind it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Work] = []
        self.num_done = 0

    def launch(self, work: Work) -> None:
        with self._lock:
            self._work.append(work)

    def mark(self) -> StreamMark:
        with self._lock:
            return _Mark(self, len(self._work))

    def do(self, count: int) -> None:
        with self._lock:
            for work in self._work[self.num_done : count]:
                work()
            self.num_done = max(self.num_done, count)


class _Mark(StreamMark):
    def __init__(self, launches: Launches, count: int) -> None:
        self._launches = launches
        self._count = count

    def wait(self) -> None:
        self._launches.do(self._count)


class _Copies(Launches, Copies):
    stream = 0

    def start(self, target: Tensor, source: Callable[[], Tensor]) -> None:
        self.launch(lambda: target.copy_(source()))

    @contextmanager
    def within(self) -> Iterator[None]:
        yield


class OrderedDevice(Launches, Queue):
    """A device whose pool is `blocks`, uint8 [num_blocks, block_bytes], initially zeros."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = torch.zeros((num_blocks, block_bytes([SEGMENT])), dtype=torch.uint8)

    def copies(self) -> Copies:
        return _Copies()

    @property
    def pool(self) -> RegisteredPool:
        blocks, nbytes = self.blocks.shape
        return RegisteredPool(
            memoryview(bytearray()), nbytes, blocks, (SEGMENT,), device=self.blocks, queue=self
        )

    def write(self, block: int, value: int) -> None:
        """Launch a kernel that fills a block."""
        self.launch(lambda: self.blocks[block].fill_(value))

    def read(self, block: int) -> list[int]:
        """Launch a kernel that reads a block. The returned list gets the first byte at its end."""
        found: list[int] = []
        self.launch(lambda: found.append(int(self.blocks[block, 0])))
        return found
