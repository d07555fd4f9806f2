"""What a wire has to provide. Pieces, acks, leases and the handshake are the same for all of them.

A new transport implements these three protocols and adds itself to the registry in `transports.py`.
"""

from __future__ import annotations

import socket
from typing import Any, Protocol

from kvtransfer.blocks.extents import BlockIndices, Blocks, Buffers
from kvtransfer.framing.channel import Channel
from kvtransfer.framing.messages import Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate

MAX_IN_FLIGHT = 3
"""Pieces sent and not acknowledged. It bounds memory on the way, and how long an abort has to wait."""


class Listener(Protocol):
    """What `Receiver` needs of a listening socket."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def accept(self) -> tuple[socket.socket, Any]: ...

    def close(self) -> None: ...


class PieceWriter(Protocol):
    """The sender's end of one connection."""

    remote_reads: bool
    """The peer reads our pool by itself, up to its acknowledgement of a piece."""

    @property
    def packed(self) -> memoryview | None:
        """The last payload's blocks as they travel, where that is not as they lie in the pool."""

    def payload(self, blocks: Blocks, num_tokens: int) -> Buffers:
        """What follows the piece's message on the connection: views of the source blocks, then a trailer.

        `num_tokens` of the prompt are valid; what a block at its end holds beyond them means nothing.
        """

    def close(self) -> None:
        """The sender gives the connection up. Idempotent, for any thread.

        A peer that reads our pool believes nothing whose read ends after this.
        """


class PieceReader(Protocol):
    """The receiver's end of one connection."""

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate | None) -> bool:
        """Bring the sender's blocks into our blocks while the gate is open.

        Without a gate they are discarded. Returns whether all of them are in place, as they were before the
        sender gave the connection up; either way the connection stands before the next message. Raises
        OSError for a broken wire, TimeoutError for one that stands.
        """

    def close(self) -> None: ...


class Transport(Protocol):
    name: str
    same_host: bool
    streams: int
    """Connections per pair of workers."""
    parts_at_once: int
    """How many parts of a prompt make a piece."""
    reaches_devices: bool
    """Its readers write a GPU's memory by themselves."""
    wire_dtype: str
    """How values travel: `auto` as they lie in the pool, or quantized (`layout.wire_segments`)."""

    def listen(self, host: str) -> tuple[Listener, str]:
        """A listening socket, or what acts like one, and the address at which peers reach it."""

    def connect(self, address: str) -> socket.socket:
        """Begin to connect, without blocking."""

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> PieceWriter:
        """Right after the handshake, on the sender."""

    def reader(
        self,
        channel: Channel,
        target: RegisteredPool,
        hello: Hello,
        deadline: float,
        progress_timeout_s: float,
    ) -> PieceReader:
        """Right after the handshake, on the receiver. `target` has blocks as the wire carries them."""

    def close(self) -> None: ...
