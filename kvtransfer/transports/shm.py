"""The `shm` transport: the receiver maps the sender's pool and copies the blocks itself.

The connection is an abstract Unix socket, so it has no file and is reachable only on this host (in this
network namespace). The sender passes its pool's file descriptor over it once; then only pieces and acks
travel.

A piece counts only if its ack could be sent after the copy: before a sender reuses the blocks it closes the
connection, so a copy of reused blocks never counts.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kvtransfer.blocks.extents import PARTS_AT_ONCE, BlockIndices, address
from kvtransfer.blocks.memory import map_peer_pool
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import Channel, Hello
from kvtransfer.transports.transport import LocalTransport, PieceReader, PieceWriter
from native.build import load_library, optional
from protocol.errors import ProtocolError

logger = logging.getLogger("tandem.kvtransfer")

GIL_FREE_BYTES = 64 * 1024
"""Bytes below which a copy keeps the GIL: waiting for the GIL afterwards would cost more than the copy."""
PAST_CACHES_BYTES = 2 * 1024 * 1024
"""Bytes from which on a copy bypasses the caches: a smaller piece may be read again while it is cached."""


@optional(logger, "blocks are copied one by one")
def compiled() -> Callable[..., None]:
    return load_library(Path(__file__).parent / "gather.cpp").tandem_gather


class Gather:
    """A copier of `block_bytes` blocks from `source` to `target`. Neither buffer may move in memory."""

    def __init__(self, source: memoryview, target: memoryview, block_bytes: int) -> None:
        self._source = source
        self._target = target
        self._source_address = address(source)
        self._target_address = address(target)
        self._block_bytes = block_bytes
        self._compiled = compiled()

    def copy(self, sources: BlockIndices, targets: BlockIndices, first: int, last: int) -> None:
        """Copy the bytes [first, last) of a piece, which consists of the blocks in order."""
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
    """Yield source, target and length, in bytes, of each block's part within [first, last)."""
    while first < last:
        index, start = divmod(first, block_bytes)
        length = min(block_bytes - start, last - first)
        yield int(sources[index]) * block_bytes + start, int(targets[index]) * block_bytes + start, length
        first += length


_SLICE_BYTES = 4 * 1024 * 1024
"""Bytes that are copied between two checks of the gate: well under a millisecond."""


class ShmWriter(PieceWriter):
    remote_reads = True


class ShmReader(PieceReader):
    def __init__(self, pool: RegisteredPool, mapping: mmap.mmap) -> None:
        self._pool = pool
        self._mapping = mapping
        self._source = memoryview(mapping)
        self._gather = Gather(self._source, pool.buffer, pool.block_bytes)

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        nbytes = len(sources) * self._pool.block_bytes
        for start in range(0, nbytes, _SLICE_BYTES):
            with gate.writing() as is_open:
                if not is_open:
                    return False
                self._gather.copy(sources, targets, start, min(start + _SLICE_BYTES, nbytes))
        return True

    def close(self) -> None:
        self._source.release()
        self._mapping.close()


class ShmTransport(LocalTransport):
    name = "shm"
    parts_at_once = PARTS_AT_ONCE

    def __init__(self) -> None:
        compiled()  # build the kernel now, not at the first piece

    def fault(self, pool: RegisteredPool) -> str:
        return "the pool is not in shared memory" if pool.memory_fd is None else ""

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> ShmWriter:
        assert pool.memory_fd is not None
        channel.ready(select.POLLOUT, deadline)
        socket.send_fds(channel.socket, [b"\0"], [pool.memory_fd])
        return ShmWriter(pool)

    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> ShmReader:
        channel.ready(select.POLLIN, deadline)
        _, fds, _, _ = socket.recv_fds(channel.socket, 1, 1)
        if not fds:
            raise ProtocolError("the sender passed no pool")
        try:
            mapping = map_peer_pool(fds[0], hello.num_blocks * target.block_bytes)
        finally:
            os.close(fds[0])
        return ShmReader(target, mapping)
