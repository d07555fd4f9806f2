"""A lossless code for bf16 KV on slow wires: about 0.7 of the bytes, encoded in slices of a piece.

Nearly all exponents of KV values lie in a window of seven, so three bits replace eight. `codec.cpp` has the
format. A slice that the code would not shorten is copied.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtransfer.blocks.extents import BlockIndices, address
from native.build import load_library, optional
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo

logger = logging.getLogger("tandem.kvtransfer")

CODEC = "bf16-window7"
"""The name of the code in the handshake."""
SLICE_BYTES = 1024 * 1024
"""Bytes of a piece that are encoded at once: a slice is sent before the next one is encoded."""
_GROUP_BYTES = 512
_SLACK = 8
"""Bytes after a code that the native functions may read or overwrite without using them."""


class UndecodableError(TandemError):
    """A coded piece was damaged on the way."""


@optional(logger, "KV is sent without lossless coding")
def _library() -> ctypes.CDLL:
    return load_library(Path(__file__).parent / "codec.cpp")


def is_available() -> bool:
    return _library() is not None


def suits(segments: Sequence[SegmentInfo]) -> bool:
    """Return whether blocks of these segments have bf16 values."""
    return any(segment.dtype == "bfloat16" and segment.quantization == "none" for segment in segments)


def slices(nbytes: int) -> Iterator[tuple[int, int]]:
    """Cut a piece into the byte ranges that are encoded at once."""
    for first in range(0, nbytes, SLICE_BYTES):
        yield first, min(first + SLICE_BYTES, nbytes)


class Codec:
    """An encoder and decoder of slices of pieces, in `staging`; blocks have `block_bytes` bytes. For one
    thread at a time.
    """

    def __init__(self, block_bytes: int) -> None:
        self.staging = np.empty(SLICE_BYTES + SLICE_BYTES // _GROUP_BYTES + _SLACK, np.uint8).data
        self._staging_address = address(self.staging)
        self._block_bytes = block_bytes

    def encode(self, buffer: memoryview, blocks: BlockIndices, first: int, last: int) -> memoryview:
        """Encode the bytes [first, last) of a piece in `buffer`. The result is valid until the next call."""
        library, blocks = _library(), np.ascontiguousarray(blocks)
        assert library is not None
        where = (address(buffer), blocks.ctypes.data, self._block_bytes, first, last)
        return self.staging[: library.tandem_encode(self._staging_address, *where)]

    def decode(self, size: int, buffer: memoryview, blocks: BlockIndices, first: int, last: int) -> bool:
        """Decode `size` bytes of `staging` to the bytes [first, last) of a piece. Return False if the code is
        not one of exactly that many bytes.
        """
        library, blocks = _library(), np.ascontiguousarray(blocks)
        assert library is not None
        where = (address(buffer), blocks.ctypes.data, self._block_bytes, first, last)
        return bool(library.tandem_decode(*where, self._staging_address, size))
