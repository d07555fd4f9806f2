"""The ranks of one worker, and the one thing that they exchange within a forward: columns of activations.

Each rank computes some outputs of every linear layer, each of them whole, summed in the order in which one
process alone would. So nothing is ever summed over ranks, and a model's results have the same bits on any
number of them. All-reduced partial sums would move less data between two layers, and change bits.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from native.build import BuildError, address_of, declare, load_library
from protocol.errors import ConfigError, TandemError

GATHER_TIMEOUT_S = 10.0
"""A rank that another one waits for longer is lost. They do the same work at the same time."""

_HEADER_BYTES = mmap.PAGESIZE
_ROOM_BYTES = 16 << 20
"""The size of each of the two rooms, more than any row takes. Only touched memory is used: some 256 KiB."""


class LostRankError(TandemError):
    """A rank of this worker has ended, or does not answer. The worker can't go on without it."""


class ExchangeArgs(ctypes.Structure):
    """`Exchange` in `exchange.cpp`, which explains the fields."""

    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("rooms", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("room_bytes", "ranks", "timeout_ns", "gathers")),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises ConfigError where it cannot be had."""
    try:
        library = load_library(Path(__file__).parent / "exchange.cpp", ExchangeArgs)
    except BuildError as error:
        raise ConfigError(f"a tensor-parallel size above 1 needs a C++ compiler: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    declare(library, "tandem_gather", ctypes.c_bool, *[pointer] * 3, *[number] * 4)
    declare(library, "tandem_is_lost", ctypes.c_bool, pointer)
    declare(library, "tandem_give_up", None, pointer)
    return library


class Columns(NamedTuple):
    """The columns that a rank has of rows of `width` columns."""

    own: range
    width: int


class Ranks:
    """This process' place among the ranks of its worker. All of them are forked from the first one, and
    inherit the memory through which they exchange.
    """

    def __init__(self, size: int, rank: int = 0, memory: mmap.mmap | None = None) -> None:
        """Without `memory` it is the first one's."""
        self.rank, self.size = rank, size
        self._memory = memory or mmap.mmap(-1, _HEADER_BYTES + 2 * _ROOM_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        rooms, timeout_ns = start + _HEADER_BYTES, int(GATHER_TIMEOUT_S * 1e9)
        self._exchange = ExchangeArgs(start, rooms, _ROOM_BYTES, size, timeout_ns)

    def other(self, rank: int) -> Ranks:
        """Another rank's view of them, for the process that is to be it."""
        return Ranks(self.size, rank, self._memory)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the exchange and of its gather function. Native callers ask `check` afterwards."""
        return ctypes.addressof(self._exchange), address_of(_library().tandem_gather)

    def parts(self, count: int, unit: int = 1) -> list[range]:
        """Each rank's part of `count` things, in whole units if there are enough of these for all."""
        if count < unit * self.size:
            unit = 1
        units = -(-count // unit)
        ends = [min(rank * units // self.size * unit, count) for rank in range(self.size + 1)]
        return [range(*ends) for ends in itertools.pairwise(ends)]

    def own(self, count: int, unit: int = 1) -> range:
        """This rank's part."""
        return self.parts(count, unit)[self.rank]

    def gather(self, part: Tensor, columns: Columns) -> Tensor:
        """Each rank has some columns of the same rows, [..., own]: all of them, [..., width].

        Two ranks may have the same columns, with the same values. Raises LostRankError.
        """
        own, width = columns
        part = part.contiguous()
        whole = part.new_empty((*part.shape[:-1], width))
        if width * part.itemsize > _ROOM_BYTES:
            raise ValueError(f"rows of {width} {part.dtype} exceed the {_ROOM_BYTES} bytes of an exchange")
        rows, item = whole.numel() // width, part.itemsize
        sizes = rows, own.start * item, len(own) * item, width * item
        gather = _library().tandem_gather
        if not gather(ctypes.byref(self._exchange), part.data_ptr(), whole.data_ptr(), *sizes):
            raise LostRankError("a rank does not answer")
        return whole

    def check(self) -> None:
        """Raises LostRankError if gathers did not succeed."""
        if _library().tandem_is_lost(ctypes.byref(self._exchange)):
            raise LostRankError("a rank does not answer")

    def give_up(self) -> None:
        """A rank is lost: all gathers fail from now on. Any thread may call it."""
        _library().tandem_give_up(ctypes.byref(self._exchange))
