"""The sender's end of one data connection: a thread that sends pieces and receives their acks."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvtransfer.blocks.codec import suits
from kvtransfer.blocks.convert import NonFiniteError
from kvtransfer.blocks.extents import Buffers, ScatterList, piece_checksum
from kvtransfer.messages import (
    LENGTH_BYTES,
    PREFIX_BYTES,
    SPOILED,
    Ack,
    Channel,
    Piece,
    PieceRefusal,
    decode,
    encode,
    error_kind,
    frame,
    frame_length,
    unframe,
)
from kvtransfer.streams.coding import WireCoding
from kvtransfer.streams.handshake import Identity, introduce
from kvtransfer.streams.pieces import QueuedPiece
from kvtransfer.transports.transport import MAX_IN_FLIGHT, PieceWriter, Transport
from messaging.wake import StoppedError, Wake
from protocol.errors import ProtocolError
from protocol.ids import PeerAddress, TransferOffer

logger = logging.getLogger("tandem.kvtransfer")

_ZEROS = memoryview(bytes(1024 * 1024))


class StreamOwner(Protocol):
    """The interface of a link for its streams. `state` guards the queue and every stream's `in_flight`."""

    state: threading.Condition

    def take(self, max_parts: int) -> QueuedPiece | None:
        """Return the next piece to send; called with `state` held."""

    def acknowledged(self, stream: Stream, piece: QueuedPiece, ack: Ack) -> None:
        """Remove the piece from the stream's `in_flight`, and queue it again if it has to be resent."""

    def ended(self, stream: Stream, kind: str, reason: str) -> None:
        """React to a closed connection. `kind` is the kind of failure; empty if the end was requested."""


class _Transmission:
    """A piece being written to the connection: at once, or in coded slices."""

    def __init__(self, piece: QueuedPiece, header: bytes, payload: Buffers, coded: Iterator[Buffers]) -> None:
        self.piece = piece
        self._header = memoryview(header)
        self._coded = coded
        self._padded = False
        self.rest = ScatterList([self._header, *payload])

    def next_slice(self) -> bool:
        payload = next(self._coded, None)
        if payload is not None:
            self.rest = ScatterList(payload)
        return payload is not None

    def pad(self) -> None:
        """Send zeros instead of the rest of the blocks, and mark the piece as spoiled in its trailer.

        A coded piece ends itself, after the slice that is already encoded.
        """
        if self._padded or self.piece.coded:
            return
        self._padded = True
        header = self._header[self.rest.done :]
        missing = self.rest.remaining - len(header) - len(SPOILED)
        zeros = [_ZEROS[: min(len(_ZEROS), missing - at)] for at in range(0, missing, len(_ZEROS))]
        self.rest = ScatterList([header, *zeros, memoryview(SPOILED)])


class Stream(threading.Thread):
    """A thread with one connection to a peer incarnation. `open` connects, `start` begins to send."""

    def __init__(
        self,
        peer: PeerAddress,
        transport: Transport,
        identity: Identity,
        owner: StreamOwner,
        progress_timeout_s: float,
    ) -> None:
        super().__init__(name=f"kv-send-{transport.name}-{peer.worker_id}", daemon=True)
        self.in_flight: deque[tuple[int, QueuedPiece]] = deque()
        self.retired = False
        self._closed = False
        self._peer = peer
        self._transport = transport
        self._identity = identity
        self._owner = owner
        self._progress_timeout_s = progress_timeout_s
        self._wake = Wake()
        self._reading = threading.Lock()  # held while source blocks are read here
        self._current: _Transmission | None = None
        self._channel: Channel | None = None
        self._writer: PieceWriter | None = None
        self._coding: WireCoding | None = None
        self._acks = bytearray()
        self._sequence = 0
        self._progress_at = time.monotonic()

    @property
    def transport_name(self) -> str:
        return self._transport.name

    @property
    def wire_block_bytes(self) -> int:
        assert self._writer is not None
        return self._writer.block_bytes

    # --- for any thread ---------------------------------------------------------------------------

    def open(self, offer: TransferOffer, deadline: float) -> None:
        """Connect and authenticate. Raises OSError, TransferError, ProtocolError or StoppedError."""
        try:
            sock = self._transport.connect(offer.address)
            self._channel = channel = self._transport.channel(
                sock, self._wake, self._progress_timeout_s, accepted=False
            )
            channel.finish_connect(deadline)
            pool, incarnation = self._identity.pool, self._peer.incarnation
            may_code = introduce(channel, self._identity, self._transport, incarnation, deadline)
            self._writer = self._transport.writer(channel, pool, deadline)
            if may_code and suits(pool.segments):
                self._coding = WireCoding(self._writer.block_bytes)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        with self._owner.state:
            if not self._closed:
                self._wake.set()

    def stop(self) -> None:
        with self._owner.state:
            if not self._closed:
                self._wake.stop()

    def retire(self) -> None:
        """Send no more pieces, and end when all pieces in flight are acknowledged."""
        self.retired = True
        self.wake()

    def let_go(self, lease_id: str, deadline: float) -> bool:
        """Wait until none of an aborted lease's source blocks is read.

        A peer that reads the blocks itself has until the deadline. Then the connection is closed, and this
        returns False; the peer ignores blocks that it still reads.
        """
        with self._reading:
            pass  # from now on only padding is sent for an unwanted piece
        if self._writer is None or not self._writer.remote_reads:
            return True
        state = self._owner.state
        with state:
            while any(piece.lease_id == lease_id for _, piece in self.in_flight):
                if not state.wait(deadline - time.monotonic()):
                    assert self._channel is not None
                    self._writer.close()  # from here on the peer ignores blocks that it reads
                    self._channel.shutdown()
                    return False
        return True

    # --- the stream's own thread ------------------------------------------------------------------

    def run(self) -> None:
        kind, reason = "", "the link is closing"
        try:
            self._serve()
        except StoppedError:
            logger.debug("a %s stream to %s is closing", self.transport_name, self._peer.worker_id)
        except Exception as error:
            kind, reason = error_kind(error), str(error)
            if kind == "internal":
                logger.exception("a stream to %s ended by a defect", self._peer.worker_id)
        finally:
            # Close first: the peer then ignores every block that it has not copied yet.
            self.close()
            self._owner.ended(self, kind, f"{self.transport_name}: {reason}")

    def close(self) -> None:
        """Close a stream that was never started. (`stop` or `retire` ends a running one.)"""
        if self._writer is not None:
            self._writer.close()
        if self._channel is not None:
            self._channel.close()
        with self._owner.state:
            self._closed = True
            self._wake.close()

    def _serve(self) -> None:
        channel, writer = self._channel, self._writer
        assert channel is not None and writer is not None
        while True:
            if self._current is None and not self.retired:
                self._current = self._take(writer)
            if self._current is not None and self._write(channel, writer, self._current):
                continue
            if self.retired and not self.in_flight:
                return
            events = select.POLLIN | (select.POLLOUT if self._current is not None else 0)
            deadline = self._progress_at + self._progress_timeout_s if self.in_flight else None
            if channel.wait(events, deadline) & ~select.POLLOUT:
                self._read_acks(channel)

    def _take(self, writer: PieceWriter) -> _Transmission | None:
        """Take the next piece of the lease whose turn it is."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return None
        with self._reading:  # an abort waits until the blocks of a piece in flight are read
            with self._owner.state:
                queued = self._owner.take(self._transport.parts_at_once)
                if queued is None:
                    return None
                self._sequence += 1
                self.in_flight.append((self._sequence, queued))
            self._progress_at = queued.sent_at = time.monotonic()
            payload: Buffers = []
            coded: Iterator[Buffers] = iter(())
            checksum, refusal = None, ""
            try:
                queued.after.wait()
                buffer, indices = writer.source(queued.blocks, queued.num_tokens)
                coding = None if queued.attempts else self._coding
                queued.coded = coding is not None and coding.chooses(buffer, indices)
                if queued.coded or self._identity.checksum != "off":
                    writer.wait_arrived()
                checksum = piece_checksum(
                    self._identity.checksum,
                    buffer,
                    writer.block_bytes,
                    indices,
                    queued.lease_id,
                    queued.index,
                )
                queued.wire_bytes = queued.num_blocks * writer.block_bytes
                if queued.coded and coding is not None:
                    coded = coding.slices(buffer, indices, queued)
                    payload = next(coded)
                else:
                    payload = writer.payload(buffer, indices)
            except NonFiniteError as error:
                refusal = str(error)
        if refusal:
            self._give_up(queued, refusal)
            return None
        piece = Piece(
            sequence=self._sequence,
            lease_id=queued.lease_id,
            index=queued.index,
            num_parts=len(queued.parts),
            runs=queued.runs,
            final=queued.final,
            checksum=checksum,
            pushed_s=queued.pushed_s,
            waited_s=queued.sent_at - queued.queued_at,
            attempt=queued.attempts,
            block_pool=queued.block_pool,
            coded=queued.coded,
        )
        return _Transmission(queued, frame(encode(piece)), payload, coded)

    def _give_up(self, queued: QueuedPiece, reason: str) -> None:
        """Report that the piece cannot be sent. None of its bytes was sent."""
        logger.warning("lease %s: %s", queued.lease_id, reason)
        with self._owner.state:
            sequence, _ = self.in_flight[-1]
            self._wake.set()  # the queue may have more pieces
        self._owner.acknowledged(self, queued, Ack(sequence, PieceRefusal.NOT_QUANTIZABLE))

    def _write(self, channel: Channel, writer: PieceWriter, transmission: _Transmission) -> bool:
        """Write some of the piece; return False if the connection accepts nothing now."""
        with self._reading:
            if not transmission.piece.wanted and not writer.remote_reads:
                transmission.pad()
            sent = channel.write(transmission.rest.batch())
        if not sent:
            return False
        transmission.rest.advance(sent)
        if not transmission.rest.remaining:
            with self._reading:
                if not transmission.next_slice():
                    self._current = None
        self._progress_at = time.monotonic()
        return True

    def _read_acks(self, channel: Channel) -> None:
        received = memoryview(bytearray(4096))
        self._acks += received[: channel.receive([received])]
        while len(self._acks) >= LENGTH_BYTES:
            end = PREFIX_BYTES + frame_length(self._acks)
            if len(self._acks) < end:
                return
            self._acknowledged(decode(unframe(self._acks[:end]), Ack))
            del self._acks[:end]

    def _acknowledged(self, ack: Ack) -> None:
        with self._owner.state:
            sent = len(self.in_flight) - (self._current is not None)
            if not sent or self.in_flight[0][0] != ack.sequence:
                raise ProtocolError(f"an ack of piece {ack.sequence}, which is not the oldest one sent")
            _, piece = self.in_flight[0]
        self._progress_at = time.monotonic()
        if self._coding is not None and not ack.error:
            self._coding.acknowledged(piece)
        self._owner.acknowledged(self, piece, ack)
