"""The receiver's end of one data connection: a thread that authenticates the sender and takes its pieces."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.channel import Channel, StoppedError, Wake, decode
from kvtransfer.counters import Counters
from kvtransfer.extents import blocks_per_piece, expand, from_wire
from kvtransfer.handshake import HandshakeRefusedError, Identity, examine
from kvtransfer.interface import Failed, Progress, ReceiveEvent
from kvtransfer.leases import LeaseTable
from kvtransfer.messages import Ack, Hello, Piece
from kvtransfer.transport import PieceReader, Transport
from protocol.errors import ProtocolError

logger = logging.getLogger("tandem.kvtransfer")


@dataclass(frozen=True)
class ReceiverCore:
    """What the connections of one receiver share."""

    identity: Identity
    leases: LeaseTable
    counters: Counters
    stop: Wake
    emit: Callable[[ReceiveEvent], None]
    progress_timeout_s: float
    handshake_timeout_s: float


class Connection(threading.Thread):
    """Serves one accepted socket until it ends."""

    def __init__(self, accepted: socket.socket, transport: Transport, core: ReceiverCore) -> None:
        super().__init__(name=f"kv-receive-{transport.name}", daemon=True)
        self.authenticated = False
        self._channel = Channel(accepted, core.stop)
        self._transport = transport
        self._core = core

    def run(self) -> None:
        reason = f"{self._transport.name}: the sender closed the connection"
        try:
            self._serve()
        except StoppedError:
            reason = "the receiver is closing"
        except HandshakeRefusedError as error:
            reason = str(error)
            self._core.counters.add("handshakes_refused")
            logger.warning("refused a %s connection: %s", self._transport.name, error)
        except ProtocolError as error:
            reason = self._count("malformed", error)
        except TimeoutError as error:
            reason = self._count("timeout", error)
        except OSError as error:
            reason = self._count("lost", error)
        except Exception as error:
            logger.exception("a %s connection ended by a defect", self._transport.name)
            reason = self._count("internal", error)
        finally:
            self._channel.close()
            for lease_id in self._core.leases.fail_written_by(self):
                self._core.emit(Failed(lease_id, reason))

    def _count(self, kind: str, error: Exception) -> str:
        self._core.counters.add(f"failures_{kind}")
        return f"{self._transport.name}: {error}"

    def _serve(self) -> None:
        core = self._core
        deadline = time.monotonic() + core.handshake_timeout_s
        hello = examine(self._channel, core.identity, self._transport.name, deadline)
        reader = self._transport.reader(
            self._channel, core.identity.pool, hello, deadline, core.progress_timeout_s
        )
        try:
            self.authenticated = True
            core.counters.add("connections_accepted")
            logger.info(
                "%s connection from %s (%s)", self._transport.name, hello.worker_id, hello.incarnation
            )
            while self._next_piece(reader, hello):
                pass
        finally:
            reader.close()

    def _next_piece(self, reader: PieceReader, hello: Hello) -> bool:
        """Take one piece. False: the sender has closed the connection, between pieces."""
        channel, core = self._channel, self._core
        channel.wait(select.POLLIN, None)
        started = time.monotonic()
        if channel.at_end():
            return False
        piece = decode(channel.recv_frame(started + core.progress_timeout_s), Piece)
        pool = core.identity.pool
        runs = from_wire(piece.runs, hello.num_blocks, blocks_per_piece(pool.block_bytes))
        targets = expand(runs[:, 1], runs[:, 2])
        lease, refusal = core.leases.admit(piece.lease_id, targets, self)
        in_place = reader.read(runs, lease)
        if lease is not None and not in_place:
            refusal = "given up by the sender" if lease.open else "unknown lease"
        if refusal:
            core.counters.add("failures_" + refusal.replace(" ", "_"))
        channel.send(Ack(piece.sequence, refusal), time.monotonic() + core.progress_timeout_s)
        if lease is not None and in_place:
            self._account(len(targets), time.monotonic() - started)
            received = core.leases.record(lease, targets, piece.final)
            core.emit(Progress(lease.lease_id, received, lease.complete))
        return True

    def _account(self, num_blocks: int, seconds: float) -> None:
        counters, name = self._core.counters, self._transport.name
        counters.add(f"{name}_bytes_received", num_blocks * self._core.identity.pool.block_bytes)
        counters.add(f"{name}_pieces_received")
        counters.add(f"{name}_receive_seconds", seconds)
