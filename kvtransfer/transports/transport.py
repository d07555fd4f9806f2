"""The interface of a transport, with TCP sockets between hosts and Unix sockets within one.

Pieces, acks, leases and the handshake are common to all transports. A new transport derives from `Transport`,
overrides methods where it differs from a plain TCP stream, and is added to `registry.py`.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers, views
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, Channel, Hello
from messaging.wake import Wake
from protocol.errors import ProtocolError
from protocol.ports import ANY_PORT, bind_one


def host_id() -> str:
    """Return an id that is equal in all processes of one boot of one host that see the same abstract Unix
    sockets.

    Such sockets belong to a network namespace, so two containers of a host have different ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return platform.node() or "unknown"
    return f"{boot}:{namespace}"


_DEAD_AFTER_MS = 30_000


def listen_tcp(host: str, ports: Sequence[int]) -> tuple[socket.socket, str]:
    """Return a socket that listens on `host`, on one of these ports, and its address."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]

    def listen(port: int) -> socket.socket:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A range is too small for ports that stay in TIME_WAIT for a minute after their connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, port != 0)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        return listener

    listener = bind_one(ports, listen)
    return listener, "{}:{}".format(*listener.getsockname()[:2])


def connect_tcp(address: str) -> socket.socket:
    """Start to connect to `host:port`, without blocking."""
    host, _, port = address.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    )[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    tune(sock)
    code = sock.connect_ex(target)
    if code not in (0, errno.EINPROGRESS):
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def tune(sock: socket.socket) -> None:
    """Set the socket to send at once and to detect a dead host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)


MAX_IN_FLIGHT = 3
"""Most pieces sent but not acknowledged. It bounds memory in transit, and the time that an abort waits."""


class PieceWriter:
    """The sender's end of one connection: a piece's message is followed by the pool's blocks."""

    remote_reads = False
    """Whether the peer reads our pool itself, until it acknowledges the piece."""

    def __init__(self, pool: RegisteredPool, block_bytes: int | None = None) -> None:
        self.block_bytes = block_bytes or pool.block_bytes
        """Bytes of a block on the wire."""
        self._pool = pool

    def source(self, blocks: Blocks, num_tokens: int) -> tuple[memoryview, BlockIndices]:
        """Return a buffer with the blocks as they are sent, and their indices in it; valid until the next
        call.

        Only the prompt's first `num_tokens` tokens are valid; the rest of its last block is garbage.
        """
        return self._pool.buffer, blocks[0]

    def wait_arrived(self) -> None:
        """Wait until all of `source`'s blocks are in its buffer. (`payload`'s buffers wait on access.)"""
        return

    def payload(self, buffer: memoryview, indices: BlockIndices) -> Buffers:
        """Return the bytes after the piece's message: the blocks of `source` and a trailer, or nothing."""
        if self.remote_reads:
            return []
        return [views(buffer, self.block_bytes, indices), memoryview(GOOD)]

    def close(self) -> None:
        """Give up the connection. Idempotent, for any thread.

        A peer that reads our pool ignores blocks that it reads afterwards.
        """
        return


class PieceReader(ABC):
    """The receiver's end of one connection."""

    saved_bytes = 0
    """Bytes that coding saved in the last coded piece."""

    @abstractmethod
    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        """Copy the sender's blocks into our blocks while the gate is open; discard the rest.

        Return whether all blocks are in place, read before the sender gave the connection up. In either case
        the next message follows on the connection. Raises OSError if the connection is broken, TimeoutError
        if it makes no progress.
        """

    def read_coded(self, targets: BlockIndices, gate: WriteGate) -> bool:
        """Decode a coded piece into our blocks, like `read`. Raises UndecodableError, after the piece's end,
        for damaged slices.
        """
        raise ProtocolError("this transport carries no coded pieces")

    def close(self) -> None:
        return


class Transport(ABC):
    name: ClassVar[str]
    same_host = False
    parts_at_once = 1
    """Number of a prompt's parts in a piece."""
    reaches_devices = False
    """Whether its readers can write to a GPU's memory."""
    streams = 1
    """Connections per pair of workers."""
    wire_dtype = "auto"
    """Dtype of values on the wire: `auto` is the pool's; others quantize (`layout.wire_segments`)."""
    codec = ""
    """The lossless code of bf16 blocks (`blocks.codec`); empty for none."""

    def listen(self, host: str, ports: Sequence[int] = ANY_PORT) -> tuple[socket.socket, str]:
        """Return a listening socket and its address for peers. Raises `ConfigError`."""
        return listen_tcp(host, ports)

    def connect(self, address: str) -> socket.socket:
        """Start to connect, without blocking."""
        return connect_tcp(address)

    def channel(
        self, sock: socket.socket, wake: Wake, progress_timeout_s: float, *, accepted: bool
    ) -> Channel:
        """Return the channel for a socket of `connect`, or for an `accepted` one."""
        return Channel(sock, wake, progress_timeout_s)

    def fault(self, pool: RegisteredPool) -> str:
        """Return why the transport cannot send from this pool; empty if it can."""
        return ""

    @abstractmethod
    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        """Return the sender's end. Called right after the handshake."""

    @abstractmethod
    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> PieceReader:
        """Return the receiver's end, after the handshake. `target` has blocks as on the wire."""

    def close(self) -> None:
        return


class LocalTransport(Transport):
    """A transport between processes of a host, over abstract Unix sockets: these have no file, and are
    reachable only in their network namespace.
    """

    same_host = True

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
