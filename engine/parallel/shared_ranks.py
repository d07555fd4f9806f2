"""Ranks on the CPUs of one host, forked from the first rank, which gather through shared memory.

Between two processes, gloo takes 14 times as long for a row of 576 floats, and 20 times as long for 4,096.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path

from torch import Tensor

from engine.parallel import group
from engine.parallel.group import Columns, LostRankError, Ranks
from native.build import BuildError, address_of, load_library
from native.structs import fields
from protocol.errors import ConfigError

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
        rooms, timeout_ns = start + _HEADER_BYTES, int(group.GATHER_TIMEOUT_S * 1e9)
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
