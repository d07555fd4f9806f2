"""Copies scattered blocks from one pool to another: in a compiled call, or one by one without a compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtransfer.blocks.extents import BlockIndices
from native.build import BuildError, load_library

logger = logging.getLogger("tandem.kvtransfer")

GIL_FREE_BYTES = 64 * 1024
"""Shorter copies keep the GIL: getting it back from a busy thread costs more than the copy."""
PAST_CACHES_BYTES = 2 * 1024 * 1024
"""A smaller piece may be read again while it is still in a cache."""


@functools.cache
def compiled() -> Callable[..., None] | None:
    """Return the compiled kernel, built at the first call, or None if it cannot be built."""
    try:
        function = load_library(Path(__file__).parent / "gather.cpp").tandem_gather
    except BuildError as error:
        logger.warning("blocks are copied one by one: %s", error)
        return None
    function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 4, ctypes.c_int32]
    function.restype = None
    return function


class Gather:
    """Copies blocks of `block_bytes` bytes from `source` to `target`, neither of which may move in memory."""

    def __init__(self, source: memoryview, target: memoryview, block_bytes: int) -> None:
        self._source = source
        self._target = target
        self._source_address = _address(source)
        self._target_address = _address(target)
        self._block_bytes = block_bytes
        self._compiled = compiled()

    def copy(self, sources: BlockIndices, targets: BlockIndices, first: int, last: int) -> None:
        """Copy the bytes [first, last) of a piece, whose blocks are taken in order."""
        nbytes = len(sources) * self._block_bytes
        if self._compiled is None or nbytes < GIL_FREE_BYTES:
            for source, target, length in _ranges(sources, targets, self._block_bytes, first, last):
                self._target[target : target + length] = self._source[source : source + length]
            return
        sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
        self._compiled(
            self._target_address,
            self._source_address,
            sources.ctypes.data,
            targets.ctypes.data,
            len(sources),
            self._block_bytes,
            first,
            last,
            nbytes >= PAST_CACHES_BYTES,
        )


def _ranges(
    sources: BlockIndices, targets: BlockIndices, block_bytes: int, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """Yield source, target and length in bytes of each block's part in [first, last)."""
    while first < last:
        index, start = divmod(first, block_bytes)
        length = min(block_bytes - start, last - first)
        yield int(sources[index]) * block_bytes + start, int(targets[index]) * block_bytes + start, length
        first += length


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
