"""The ranks of one worker, and their only exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer. It sums each output completely, in the order of a
single process. So no sum crosses ranks, and a model's results have the same bits on any number of ranks.
All-reducing partial sums would move less data between two layers, but change bits.

Ranks on the CPUs of one host are forked from the first rank, and gather through shared memory: between two
processes, gloo takes 14 times as long for a row of 576 floats, and 20 times as long for 4,096.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

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
