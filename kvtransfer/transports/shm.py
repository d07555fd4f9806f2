"""The `shm` transport: the receiver maps the sender's pool and copies the blocks itself.

The connection is an abstract Unix socket, so it has no file and is reachable only on this host (in this
network namespace). The sender passes its pool's file over it once; after that only pieces and acks travel.

A piece counts only if its acknowledgement could be sent after the copy: a sender that gives us up closes
the connection before it reuses the blocks, so a copy of reused blocks never counts.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
from collections.abc import Sequence

from kvtransfer.blocks.extents import PARTS_AT_ONCE, BlockIndices
from kvtransfer.blocks.gather import Gather, compiled
from kvtransfer.blocks.memory import map_peer_pool
from kvtransfer.framing.channel import Channel
from kvtransfer.framing.messages import Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.transports.transport import PieceReader, PieceWriter, Transport
from protocol.errors import ProtocolError
from protocol.ports import ANY_PORT

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


class ShmTransport(Transport):
    name = "shm"
    same_host = True
    parts_at_once = PARTS_AT_ONCE

    def __init__(self) -> None:
        compiled()  # build the kernel now, not at the first piece

    def listen(self, host: str, ports: Sequence[int] = ANY_PORT) -> tuple[socket.socket, str]:
        address = f"tandem-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + address)
        listener.listen(128)
        return listener, address

    def connect(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect("\0" + address)
        except OSError:
            sock.close()
            raise
        return sock

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
