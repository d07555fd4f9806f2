"""The sender's end of one data connection: a thread that connects, sends pieces and takes their acks."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtransfer.channel import LENGTH_BYTES, Channel, StoppedError, Wake, decode, encode, frame, frame_length
from kvtransfer.counters import Counters
from kvtransfer.extents import Runs, ScatterList, num_blocks, to_wire
from kvtransfer.handshake import Identity, introduce
from kvtransfer.interface import TransferError
from kvtransfer.messages import Ack, Piece
from kvtransfer.tcp import SPOILED
from kvtransfer.transport import PieceWriter, Transport
from protocol.errors import ProtocolError
from protocol.messages import PeerAddress, TransferOffer

logger = logging.getLogger("tandem.kvtransfer")

MAX_IN_FLIGHT = 3
"""Pieces sent and not acknowledged. It bounds memory on the way, and how long an abort has to wait."""

_ZEROS = memoryview(bytes(1024 * 1024))


@dataclass(eq=False)
class QueuedPiece:
    """Some runs of a lease on their way. `wanted` turns false when the lease is aborted."""

    lease_id: str
    runs: Runs
    final: bool
    wanted: bool = True

    @property
    def num_blocks(self) -> int:
        return num_blocks(self.runs)


@dataclass(frozen=True)
class LinkCore:
    """What the links of one sender share. The callbacks are called from the links' threads."""

    identity: Identity
    counters: Counters
    on_ack: Callable[[QueuedPiece], None]
    on_refused: Callable[[str, str], None]
    on_down: Callable[[Link, str], None]
    progress_timeout_s: float
    connect_timeout_s: float


class _Transmission:
    """A piece that is being written to the connection."""

    def __init__(self, piece: QueuedPiece, header: bytes, payload: list[memoryview]) -> None:
        self.piece = piece
        self._header = memoryview(header)
        self._padded = False
        self.rest = ScatterList([self._header, *payload])

    def pad(self) -> None:
        """Send zeros instead of what is left of the blocks, and say so in the trailer."""
        if self._padded:
            return
        self._padded = True
        header = self._header[self.rest.done :]
        missing = self.rest.remaining - len(header) - len(SPOILED)
        zeros = [_ZEROS[: min(len(_ZEROS), missing - at)] for at in range(0, missing, len(_ZEROS))]
        self.rest = ScatterList([header, *zeros, memoryview(SPOILED)])


class Link(threading.Thread):
    """One peer incarnation, reached over the first of `candidates` that works."""

    def __init__(
        self, peer: PeerAddress, candidates: list[tuple[TransferOffer, Transport]], core: LinkCore
    ) -> None:
        super().__init__(name=f"kv-send-{peer.worker_id}", daemon=True)
        self.peer = peer
        self.transport = candidates[0][1].name
        self.connected = False
        self.down = False
        self._candidates = candidates
        self._core = core
        self._wake = Wake()
        self._queues: OrderedDict[str, deque[QueuedPiece]] = OrderedDict()
        self._in_flight: deque[tuple[int, QueuedPiece]] = deque()
        self._refused: dict[str, str] = {}
        self._state = threading.Condition()
        self._reading = threading.Lock()  # held while source blocks are read here
        self._current: _Transmission | None = None
        self._remote_reads = False
        self._channel: Channel | None = None
        self._acks = bytearray()
        self._sequence = 0
        self._progress_at = time.monotonic()

    # --- for any thread ---------------------------------------------------------------------------

    def enqueue(self, pieces: Iterable[QueuedPiece]) -> None:
        """Send these pieces of one lease in order, taking turns with other leases.

        Without effect on a link that is down: `on_down` is what tells.
        """
        with self._state:
            if self.down:
                return
            for piece in pieces:
                if piece.lease_id not in self._refused:
                    self._queues.setdefault(piece.lease_id, deque()).append(piece)
            self._wake.set()

    def abort(self, lease_id: str, timeout_s: float) -> None:
        """Drop a lease's pieces. After it returns none of its source blocks is read any more.

        Where the peer reads them by itself, this waits for it to be past them, then cuts the connection.
        """
        deadline = time.monotonic() + timeout_s
        with self._state:
            self._queues.pop(lease_id, None)
            self._refused.pop(lease_id, None)
            pieces = [piece for _, piece in self._in_flight if piece.lease_id == lease_id]
        with self._reading:
            for piece in pieces:
                piece.wanted = False
        if not self._remote_reads:
            return
        with self._state:
            while not self.down and any(piece in pieces for _, piece in self._in_flight):
                if not self._state.wait(deadline - time.monotonic()):
                    self._core.counters.add("failures_abort_timeout")
                    self._cut()
                    return

    def stop(self) -> None:
        with self._state:
            if not self.down:
                self._wake.stop()

    # --- the link's own thread --------------------------------------------------------------------

    def run(self) -> None:
        reason = "the link is closing"
        try:
            self._serve(*self._connect())
        except StoppedError:
            logger.debug("the link to %s is closing", self.peer.worker_id)
        except ProtocolError as error:
            reason = self._count("malformed", error)
        except TransferError as error:
            self._core.counters.add("failures_connect")
            reason = str(error)
        except TimeoutError as error:
            reason = self._count("timeout", error)
        except OSError as error:
            reason = self._count("lost", error)
        except Exception as error:
            logger.exception("the link to %s ended by a defect", self.peer.worker_id)
            reason = self._count("internal", error)
        finally:
            self._close(reason)

    def _count(self, kind: str, error: Exception) -> str:
        self._core.counters.add(f"failures_{kind}")
        return f"{self.transport}: {error}"

    def _connect(self) -> tuple[Channel, PieceWriter]:
        reasons: list[str] = []
        for offer, transport in self._candidates:
            self.transport = transport.name
            try:
                found = self._connect_over(offer, transport)
            except (OSError, TransferError, ProtocolError) as error:
                reasons.append(f"{transport.name}: {error}")
                logger.warning("cannot reach %s over %s: %s", self.peer.worker_id, transport.name, error)
                continue
            if reasons:
                self._core.counters.add("fallbacks")
            self.connected = True
            self._core.counters.add("connections_made")
            logger.info("link to %s over %s", self.peer.worker_id, transport.name)
            return found
        raise TransferError("; ".join(reasons))

    def _connect_over(self, offer: TransferOffer, transport: Transport) -> tuple[Channel, PieceWriter]:
        identity = self._core.identity
        deadline = time.monotonic() + self._core.connect_timeout_s
        channel = Channel(transport.connect(offer.address), self._wake)
        try:
            channel.finish_connect(deadline)
            introduce(channel, identity, transport.name, self.peer.incarnation, deadline)
            writer = transport.writer(channel, identity.pool, deadline)
        except BaseException:
            channel.close()
            raise
        with self._state:
            self._channel = channel
            self._remote_reads = writer.remote_reads
        return channel, writer

    def _serve(self, channel: Channel, writer: PieceWriter) -> None:
        while True:
            if self._current is None:
                self._current = self._take(writer)
            if self._current is not None and self._write(channel, self._current):
                continue
            events = select.POLLIN | (select.POLLOUT if self._current is not None else 0)
            deadline = self._progress_at + self._core.progress_timeout_s if self._in_flight else None
            if channel.wait(events, deadline) & ~select.POLLOUT:
                self._read_acks(channel)

    def _take(self, writer: PieceWriter) -> _Transmission | None:
        """The next piece, of the lease whose turn it is."""
        with self._state:
            if not self._queues or len(self._in_flight) >= MAX_IN_FLIGHT:
                return None
            lease_id, queue = self._queues.popitem(last=False)
            queued = queue.popleft()
            if queue:
                self._queues[lease_id] = queue
            self._sequence += 1
            self._in_flight.append((self._sequence, queued))
        self._progress_at = time.monotonic()
        piece = Piece(self._sequence, lease_id, to_wire(queued.runs), queued.final)
        return _Transmission(queued, frame(encode(piece)), writer.payload(queued.runs))

    def _write(self, channel: Channel, transmission: _Transmission) -> bool:
        """Write some of the piece; False if the connection takes nothing now."""
        with self._reading:
            if not transmission.piece.wanted and not self._remote_reads:
                transmission.pad()
            try:
                sent = channel.socket.sendmsg(transmission.rest.batch())
            except BlockingIOError:
                return False
        transmission.rest.advance(sent)
        if not transmission.rest.remaining:
            self._current = None
        self._progress_at = time.monotonic()
        return True

    def _read_acks(self, channel: Channel) -> None:
        try:
            received = channel.socket.recv(4096)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        self._acks += received
        while len(self._acks) >= LENGTH_BYTES:
            end = LENGTH_BYTES + frame_length(self._acks)
            if len(self._acks) < end:
                return
            self._acknowledged(decode(self._acks[LENGTH_BYTES:end], Ack))
            del self._acks[:end]

    def _acknowledged(self, ack: Ack) -> None:
        with self._state:
            sent = len(self._in_flight) - (self._current is not None)
            if not sent or self._in_flight[0][0] != ack.sequence:
                raise ProtocolError(f"an ack of piece {ack.sequence}, which is not the oldest one sent")
            _, piece = self._in_flight.popleft()
            lease_id = piece.lease_id
            if ack.error and piece.wanted:
                self._refused.setdefault(lease_id, ack.error)
                self._queues.pop(lease_id, None)
            is_last = not any(other.lease_id == lease_id and other.wanted for _, other in self._in_flight)
            refusal = self._refused.pop(lease_id, "") if is_last else self._refused.get(lease_id, "")
            self._state.notify_all()
        self._progress_at = time.monotonic()
        if not ack.error:
            nbytes = piece.num_blocks * self._core.identity.pool.block_bytes
            self._core.counters.add(f"{self.transport}_bytes_sent", nbytes)
            self._core.counters.add(f"{self.transport}_pieces_sent")
        if refusal and is_last:
            self._core.on_refused(lease_id, refusal)
        elif piece.wanted and not refusal:
            self._core.on_ack(piece)

    def _cut(self) -> None:
        if self._channel is not None:
            self._channel.shutdown()

    def _close(self, reason: str) -> None:
        """Close the connection first: the peer then believes no block that is still to be copied."""
        with self._state:
            self.down = True
            self.connected = False
            if self._channel is not None:
                self._channel.close()
            self._queues.clear()
            self._in_flight.clear()
            self._wake.close()
            self._state.notify_all()
        self._core.on_down(self, reason)
