"""What a wire has to provide. Pieces, acks, leases and the handshake are the same for all of them.

A new transport implements these three protocols and adds itself to the registry in `transports.py`.
"""

from __future__ import annotations

import socket
from typing import Protocol

from kvtransfer.channel import Channel
from kvtransfer.extents import Runs
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases import Lease
from kvtransfer.messages import Hello


class PieceWriter(Protocol):
    """The sender's end of one connection."""

    remote_reads: bool
    """The peer reads our pool by itself, up to its acknowledgement of a piece."""

    def payload(self, runs: Runs) -> list[memoryview]:
        """What follows the piece's message on the connection: views of the source blocks, then a trailer."""


class PieceReader(Protocol):
    """The receiver's end of one connection."""

    def read(self, runs: Runs, lease: Lease | None) -> bool:
        """Bring a piece's blocks into place, as long as the lease is open; None discards them.

        Returns whether all of them are in place. Either way the connection stands before the next message.
        """

    def close(self) -> None: ...


class Transport(Protocol):
    name: str
    same_host: bool

    def listen(self, host: str) -> tuple[socket.socket, str]:
        """A listening socket, and the address at which peers reach it."""

    def connect(self, address: str) -> socket.socket:
        """Begin to connect, without blocking."""

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        """Right after the handshake, on the sender."""

    def reader(
        self, channel: Channel, pool: RegisteredPool, hello: Hello, deadline: float, progress_timeout_s: float
    ) -> PieceReader:
        """Right after the handshake, on the receiver."""
