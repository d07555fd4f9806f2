"""The ranks of one worker, and their only exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer. It sums each output completely, in the order of a
single process. So no sum crosses ranks, and a model's results have the same bits on any number of ranks.
All-reducing partial sums would move less data between two layers, but change bits.

Ranks on the CPUs of one host are forked from the first rank, and gather through shared memory: between two
processes, gloo takes 14 times as long for a row of 576 floats, and 20 times as long for 4,096. Other ranks
gather by torch.distributed: NCCL between GPUs, gloo between CPUs.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.nn.functional import pad

from native.build import BuildError, address_of, load_library
from native.structs import fields
from protocol.errors import ConfigError, TandemError

GATHER_TIMEOUT_S = 10.0
"""Seconds after which an awaited rank counts as lost. All ranks do the same work at the same time."""


class LostRankError(TandemError):
    """A rank of this worker has ended, or does not answer. The worker can't continue without it."""

    def __init__(self, reason: str = "a rank does not answer") -> None:
        super().__init__(reason)


class Columns(NamedTuple):
    """Each rank's range of a row's columns. The ranges are consecutive and cover the row."""

    parts: tuple[range, ...]

    @property
    def width(self) -> int:
        return self.parts[-1].stop

    def times(self, size: int) -> Columns:
        """Multiply the ranges by `size`: ranges of heads become ranges of their elements."""
        return Columns(tuple(range(part.start * size, part.stop * size) for part in self.parts))


class Ranks(ABC):
    """This process' rank, and its exchange with the other ranks of the worker."""

    shares_memory = False
    """Whether all ranks map one KV pool. Otherwise each rank has a pool for its own heads."""

    def __init__(self, size: int, rank: int) -> None:
        self.rank, self.size = rank, size

    def columns(self, count: int, unit: int = 1) -> Columns:
        """Divide `count` columns evenly among the ranks, in whole units if each rank can get one."""
        if count < unit * self.size:
            unit = 1
        units = -(-count // unit)
        ends = [min(rank * units // self.size * unit, count) for rank in range(self.size + 1)]
        return Columns(tuple(range(*ends) for ends in itertools.pairwise(ends)))

    @abstractmethod
    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        """Return whole rows, [..., width], from the columns that each rank has, [..., own]. All ranks call it
        in the same order, with the same number of rows. Raises LostRankError.
        """

    def check(self) -> None:  # noqa: B027
        """Raise LostRankError if a gather that native code called has failed."""

    @abstractmethod
    def give_up(self) -> None:
        """Make all further gathers fail, since a rank is lost. Any thread may call it."""


_SOURCE = Path(__file__).parent / "exchange.cpp"
_HEADER_BYTES = mmap.PAGESIZE
_ROOM_BYTES = 16 << 20
"""Bytes of each of the two rooms, more than any row takes. Only touched pages use memory: about 256 KiB."""


class ExchangeArgs(ctypes.Structure):
    _fields_ = fields(_SOURCE, "Exchange")


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library of `exchange.cpp`. Raises ConfigError if it cannot be built."""
    try:
        return load_library(_SOURCE)
    except BuildError as error:
        raise ConfigError(f"a tensor-parallel size above 1 needs a C++ compiler: {error}") from error


class SharedRanks(Ranks):
    """Ranks that gather with `exchange.cpp`. Native code calls it directly."""

    shares_memory = True

    def __init__(self, size: int, rank: int = 0, memory: mmap.mmap | None = None) -> None:
        """Use the `memory` of the first rank's exchange; without it, this is the first rank."""
        super().__init__(size, rank)
        self._memory = memory or mmap.mmap(-1, _HEADER_BYTES + 2 * _ROOM_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        rooms, timeout_ns = start + _HEADER_BYTES, int(GATHER_TIMEOUT_S * 1e9)
        self._exchange = ExchangeArgs(start, rooms, _ROOM_BYTES, size, timeout_ns)

    def other(self, rank: int) -> SharedRanks:
        """Return another rank's `SharedRanks`, for that rank's process."""
        return SharedRanks(self.size, rank, self._memory)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the exchange and of its gather function. Native callers call `check` after it."""
        return ctypes.addressof(self._exchange), address_of(_library().tandem_gather)

    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        own, width = columns.parts[self.rank], columns.width
        part = part.contiguous()
        whole = part.new_empty((*part.shape[:-1], width))
        if width * part.itemsize > _ROOM_BYTES:
            raise ValueError(f"rows of {width} {part.dtype} exceed the {_ROOM_BYTES} bytes of an exchange")
        rows, item = whole.numel() // width, part.itemsize
        sizes = rows, own.start * item, len(own) * item, width * item
        gather = _library().tandem_gather
        if not gather(ctypes.byref(self._exchange), part.data_ptr(), whole.data_ptr(), *sizes):
            raise LostRankError
        return whole

    def check(self) -> None:
        if _library().tandem_is_lost(ctypes.byref(self._exchange)):
            raise LostRankError

    def give_up(self) -> None:
        _library().tandem_give_up(ctypes.byref(self._exchange))


_SLOWEST_S = 60.0
"""The longest wait for a rank to connect, or to gather on GPUs: some load or compile more slowly."""


_OPTIONS = AllgatherOptions()
_OPTIONS.asyncOp = False
"""Whether NCCL runs in a stream of its own. In the current stream, no streams wait for each other."""


class Meeting:
    """The store through which ranks find each other: an anonymous file that forked processes inherit."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("tandem-ranks")

    def store(self, size: int) -> FileStore:
        return FileStore(f"/proc/self/fd/{self._fd}", size)


class DistributedRanks(Ranks):
    """Ranks that gather by a collective call, which CUDA graphs can capture. The first call connects."""

    def __init__(self, size: int, rank: int, meeting: Meeting, device: torch.device) -> None:
        super().__init__(size, rank)
        self.device = device
        self._meeting = meeting
        self._group: Any = None
        self._is_lost = False

    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        if self._is_lost:
            raise LostRankError
        rows, sizes = part.shape[:-1], [len(each) for each in columns.parts]
        sent = part.reshape(rows.numel(), part.shape[-1])
        sent = pad(sent, (0, max(sizes) - part.shape[-1])) if len({*sizes}) > 1 else sent.contiguous()
        got = sent.new_empty((self.size * len(sent), sent.shape[1]))
        try:
            work = self._connected()._allgather_base(got.view(torch.uint8), sent.view(torch.uint8), _OPTIONS)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise LostRankError(f"a rank does not answer: {error}") from error
        got = got.view(self.size, *sent.shape)
        if len({*sizes}) == 1:
            return got.transpose(0, 1).reshape(*rows, columns.width)
        parts = [each[:, :size] for each, size in zip(got, sizes, strict=True)]
        return torch.cat(parts, dim=1).view(*rows, columns.width)

    def agree(self, is_so: bool) -> bool:
        """Return whether `is_so` is true on all ranks, which must all call it. Waits for the device."""
        flag = torch.full((1, 1), is_so, dtype=torch.uint8, device=self.device)
        return bool(self.gather(flag, self.columns(self.size)).all())

    def _connected(self) -> Any:
        if self._group is None:
            store = self._meeting.store(self.size)
            store.set_timeout(timedelta(seconds=_SLOWEST_S))
            self._group = _nccl(store, self) if self.device.type == "cuda" else _gloo(store, self)
        return self._group

    def give_up(self) -> None:
        self._is_lost = True
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()


def _nccl(store: FileStore, ranks: Ranks) -> Any:
    from torch.distributed import ProcessGroupNCCL  # missing in CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_SLOWEST_S)
    return ProcessGroupNCCL(store, ranks.rank, ranks.size, options)


def _gloo(store: FileStore, ranks: Ranks) -> Any:
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=GATHER_TIMEOUT_S)
    return ProcessGroupGloo(store, ranks.rank, ranks.size, options)
