"""The interface of a transport. Pieces, acks, leases and the handshake are common to all.

A new transport derives from `Transport`, overrides the methods in which it differs from a plain TCP stream,
and adds itself to `registry.py`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers, views
from kvtransfer.framing.channel import Channel
from kvtransfer.framing.messages import GOOD, Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.transports.sockets import connect_tcp, listen_tcp
from messaging.wake import Wake
from protocol.ports import ANY_PORT

MAX_IN_FLIGHT = 3
"""The most pieces sent and not acknowledged. It bounds memory in transit, and the time that an abort waits.
"""


class PieceWriter:
    """The sender's end of one connection: the pool's blocks follow their piece's message on it."""

    remote_reads = False
    """Whether the peer reads our pool by itself, until it acknowledges the piece."""

    def __init__(self, pool: RegisteredPool, block_bytes: int | None = None) -> None:
        self.block_bytes = block_bytes or pool.block_bytes
        """Bytes of a block on the wire."""
        self._pool = pool

    def source(self, blocks: Blocks, num_tokens: int) -> tuple[memoryview, BlockIndices]:
        """Return a buffer with the blocks as they are sent, and their indices in it; valid until the next
        call.

        Only the prompt's first `num_tokens` tokens are valid; the rest of its last block is not.
        """
        return self._pool.buffer, blocks[0]

    def wait_arrived(self) -> None:
        """Wait until all of `source`'s blocks are in its buffer. `payload`'s buffers wait by themselves."""
        return

    def payload(self, buffer: memoryview, indices: BlockIndices) -> Buffers:
        """Return the bytes after the piece's message on the connection: `source`'s blocks and a trailer, or
        nothing.
        """
        if self.remote_reads:
            return []
        return [views(buffer, self.block_bytes, indices), memoryview(GOOD)]

    def close(self) -> None:
        """Give the connection up, as the sender. Idempotent, for any thread.

        A peer that reads our pool ignores blocks that it reads after this.
        """
        return


class PieceReader(ABC):
    """The receiver's end of one connection."""

    @abstractmethod
    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        """Copy the sender's blocks into our blocks while the gate is open; discard the rest.

        Return whether all of them are in place, as they were before the sender gave the connection up;
        either way the next message follows on the connection. Raises OSError if the connection is broken,
        TimeoutError if it makes no progress.
        """

    def close(self) -> None:
        return


class Transport(ABC):
    name: ClassVar[str]
    same_host = False
    parts_at_once = 1
    """Parts of a prompt in a piece."""
    reaches_devices = False
    """Whether its readers can write a GPU's memory."""
    streams = 1
    """Connections per pair of workers."""
    wire_dtype = "auto"
    """Dtype of values on the wire: `auto` as in the pool, or quantized (`layout.wire_segments`)."""

    def listen(self, host: str, ports: Sequence[int] = ANY_PORT) -> tuple[socket.socket, str]:
        """Return a listening socket, and the address at which peers reach it.

        Raises `ConfigError` if all ports are taken.
        """
        return listen_tcp(host, ports)

    def connect(self, address: str) -> socket.socket:
        """Begin to connect, without blocking."""
        return connect_tcp(address)

    def channel(
        self, sock: socket.socket, wake: Wake, progress_timeout_s: float, *, accepted: bool
    ) -> Channel:
        """Return the channel for a socket of `connect`, or for one that was `accepted`."""
        return Channel(sock, wake, progress_timeout_s)

    def fault(self, pool: RegisteredPool) -> str:
        """Return why it sends nothing from this pool; empty if it does."""
        return ""

    @abstractmethod
    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        """Return the sender's end. Called right after the handshake."""

    @abstractmethod
    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> PieceReader:
        """Return the receiver's end. Called right after the handshake. `target` has blocks as the wire
        carries them.
        """

    def close(self) -> None:
        return
