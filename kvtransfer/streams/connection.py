"""The receiver's end of one data connection: authenticates the sender and receives its pieces."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from kvtransfer.blocks.codec import UndecodableError
from kvtransfer.blocks.convert import Converter, RangeError
from kvtransfer.blocks.device import pinned
from kvtransfer.blocks.extents import BlockIndices, Blocks, blocks_per_part, from_wire, piece_checksum
from kvtransfer.blocks.layout import block_bytes, foreign_format
from kvtransfer.interface import Progress, ReceiveEvent, RegisteredPool
from kvtransfer.lease import Lease, LeaseTable, PieceArrival, WriteGate
from kvtransfer.messages import TRANSIENT, Ack, Hello, Piece, PieceRefusal, error_kind, failure_kind
from kvtransfer.pairs import Pairs, TransferCounters
from kvtransfer.streams.handshake import HandshakeRefusedError, Identity, examine
from kvtransfer.transports.transport import PieceReader, Transport
from messaging.wake import StoppedError, Wake
from protocol.logs import RareLog


class Incoming:
    """The destination of blocks that have our layout: written straight to the lease's blocks."""

    def __init__(self, target: RegisteredPool, max_blocks: int, foreign: str = "") -> None:
        self.target = target
        """The pool that the connection's reader writes to."""
        self.max_blocks = max_blocks
        """Most blocks in one piece of the sender."""
        self.foreign_format = foreign
        """`layout.foreign_format` of the incoming blocks."""

    def targets(self, positions: BlockIndices, leased: BlockIndices) -> BlockIndices:
        """Return the blocks of `target` to read into, for a piece whose final blocks are `leased`."""
        return leased[positions]

    def place(self, positions: BlockIndices, lease: Lease, block_pool: int, gate: WriteGate) -> bool:
        """Copy the piece from `target` into the lease's blocks if the gate is open; return whether it was."""
        return True


class Converting(Incoming):
    """The destination of blocks of another dtype, of quantized blocks, and of blocks for a GPU's memory."""

    def __init__(self, pool: RegisteredPool, hello: Hello, max_blocks: int) -> None:
        wire_bytes = block_bytes(hello.wire)
        device = pool.device.device if pool.device is not None else torch.device("cpu")
        staging = pinned(max_blocks * wire_bytes, device)
        target = RegisteredPool(staging, wire_bytes, max_blocks, tuple(hello.wire))
        super().__init__(target, max_blocks, foreign_format(hello.wire, pool.segments))
        blocks = pool.buffer if pool.device is None else pool.device
        self._copies = pool.queue.copies()
        self._converter = Converter(hello.wire, pool.segments, blocks)

    def targets(self, positions: BlockIndices, leased: BlockIndices) -> BlockIndices:
        return np.arange(len(positions))

    def place(self, positions: BlockIndices, lease: Lease, block_pool: int, gate: WriteGate) -> bool:
        staged = self.target.buffer[: len(positions) * self.target.block_bytes]
        with gate.writing() as is_open:
            if is_open:
                with self._copies.within():
                    self._converter.place(staged, positions, lease.blocks[block_pool], lease.num_tokens)
        return is_open


def incoming(pool: RegisteredPool, hello: Hello, max_blocks: int, reaches_devices: bool) -> Incoming:
    """Choose the destination. Checksums are computed on the host, so blocks with one are staged there."""
    if tuple(hello.wire) != pool.segments:
        return Converting(pool, hello, max_blocks)
    if pool.device is not None and not (reaches_devices and hello.checksum == "off"):
        return Converting(pool, hello, max_blocks)
    return Incoming(pool, max_blocks)


logger = logging.getLogger("tandem.kvtransfer")

_CLOSED = WriteGate()
_CLOSED.close()


@dataclass(frozen=True)
class ReceiverCore:
    """The state that all connections of one receiver share."""

    identity: Identity
    leases: LeaseTable
    counters: TransferCounters
    pairs: Pairs
    stop: Wake
    emit: Callable[[ReceiveEvent], None]
    on_disconnect: Callable[[], None]
    progress_timeout_s: float
    handshake_timeout_s: float
    strangers: RareLog = field(default_factory=lambda: RareLog(logger))
    """The logger of peers that failed the handshake."""


def _read(
    reader: PieceReader, piece: Piece, sources: BlockIndices, targets: BlockIndices, gate: WriteGate
) -> bool:
    return reader.read_coded(targets, gate) if piece.coded else reader.read(sources, targets, gate)


class ReceiverConnection(threading.Thread):
    """A thread that serves one accepted socket until the connection ends."""

    def __init__(self, accepted: socket.socket, transport: Transport, core: ReceiverCore) -> None:
        super().__init__(name=f"kv-receive-{transport.name}", daemon=True)
        self.authenticated = False
        self._peer = ""
        self._channel = transport.channel(accepted, core.stop, core.progress_timeout_s, accepted=True)
        self._transport = transport
        self._core = core

    def run(self) -> None:
        try:
            self._serve()
        except StoppedError:
            logger.debug("a %s connection is closing", self._transport.name)
        except HandshakeRefusedError as error:
            self._core.counters.add("handshakes_refused")
            self._core.strangers.warning("refused a %s connection: %s", self._transport.name, str(error))
        except Exception as error:
            kind = error_kind(error)
            self._failed(kind)
            text, defect = "a %s connection was lost: %s", error if kind == "internal" else None
            if self.authenticated or defect is not None:
                logger.warning(text, self._transport.name, error, exc_info=defect)
            else:
                self._core.strangers.warning(text, self._transport.name, error)
        finally:
            self._channel.close()

    def _failed(self, kind: str) -> None:
        self._core.counters.add(f"failures_{kind}")
        if self._peer:
            self._core.pairs.error(self._peer, self._transport.name, kind)

    def _serve(self) -> None:
        core = self._core
        deadline = time.monotonic() + core.handshake_timeout_s
        hello = examine(self._channel, core.identity, self._transport, deadline)
        max_blocks = blocks_per_part(hello.block_bytes) * self._transport.parts_at_once
        inlet = incoming(core.identity.pool, hello, max_blocks, self._transport.reaches_devices)
        reader = self._transport.reader(self._channel, inlet.target, hello, deadline)
        sender = f"{hello.worker_id} {hello.incarnation}"
        core.leases.connected(sender)
        try:
            self.authenticated = True
            self._peer = hello.worker_id
            core.counters.add("connections_accepted")
            logger.debug("%s connection from %s", self._transport.name, sender)
            while self._next_piece(reader, inlet, hello, sender):
                pass
        finally:
            reader.close()
            core.leases.disconnected(sender)
            core.on_disconnect()

    def _next_piece(self, reader: PieceReader, inlet: Incoming, hello: Hello, sender: str) -> bool:
        """Receive one piece. Return False if the sender has closed the connection between pieces."""
        channel, core = self._channel, self._core
        channel.wait(select.POLLIN, None)
        started = time.monotonic()
        if channel.at_end():
            return False
        piece = channel.recv(Piece, channel.progress_deadline())
        blocks = sources, positions = from_wire(piece.runs, hello.num_blocks, inlet.max_blocks)
        lease, refusal = core.leases.admit(piece, positions, sender)
        if lease is None:
            _read(reader, piece, sources, positions, _CLOSED)
        else:
            refusal = self._take(reader, inlet, hello, piece, blocks, lease)
        # The ack goes out before the piece counts: a sender that gave us up has closed the connection first.
        ack = Ack(piece.sequence, refusal, again=refusal in TRANSIENT)
        channel.send(ack, channel.progress_deadline())
        if refusal:
            self._failed(failure_kind(refusal))
            level = logging.DEBUG if core.leases.was_given_up(piece.lease_id) else logging.WARNING
            refused = "piece %d of lease %s from %s: %s"
            logger.log(level, refused, piece.index, piece.lease_id, sender, refusal)
        elif lease is not None:
            nbytes = len(sources) * inlet.target.block_bytes - piece.coded * reader.saved_bytes
            self._account(nbytes, time.monotonic() - started)
            way = PieceArrival(self._transport.name, inlet.foreign_format, nbytes, started)
            received, arrival = core.leases.record(lease, piece, positions, way)
            core.emit(Progress(lease.lease_id, received, arrival is not None, arrival))
        return True

    def _take(
        self, reader: PieceReader, inlet: Incoming, hello: Hello, piece: Piece, blocks: Blocks, lease: Lease
    ) -> str:
        """Bring a piece into its lease's blocks. Return why it is not there, or an empty string."""
        sources, positions = blocks
        gate, refusal = lease.attempt(piece, time.monotonic() + self._core.progress_timeout_s / 2)
        if gate is None:
            _read(reader, piece, sources, positions, _CLOSED)
            return refusal
        lease.after.wait()
        targets = inlet.targets(positions, lease.blocks[piece.block_pool])
        try:
            is_there = _read(reader, piece, sources, targets, gate)
        except UndecodableError:
            return PieceRefusal.CHECKSUM_MISMATCH if gate.is_open else PieceRefusal.UNKNOWN_LEASE
        if is_there:
            target = inlet.target
            found = piece_checksum(
                hello.checksum, target.buffer, target.block_bytes, targets, piece.lease_id, piece.index
            )
            try:
                if found != piece.checksum:
                    return PieceRefusal.CHECKSUM_MISMATCH if gate.is_open else PieceRefusal.UNKNOWN_LEASE
                if inlet.place(positions, lease, piece.block_pool, gate):
                    return ""
            except RangeError as error:
                logger.warning("lease %s: %s", lease.lease_id, error)
                return PieceRefusal.OUT_OF_RANGE
        return PieceRefusal.GIVEN_UP if gate.is_open else PieceRefusal.UNKNOWN_LEASE

    def _account(self, nbytes: int, seconds: float) -> None:
        self._core.pairs.add(
            self._peer,
            self._transport.name,
            {
                "kv_receive_bytes_total": nbytes,
                "kv_receive_pieces_total": 1,
                "kv_receive_seconds_total": seconds,
            },
        )
