"""The connections to one peer: over the best transport that works, or the next one when that breaks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.interface import TransferError
from kvtransfer.messages import Ack, failure_kind
from kvtransfer.pairs import Pairs, RefusalKind, TransferCounters
from kvtransfer.streams.handshake import HandshakeRefusedError, Identity
from kvtransfer.streams.pieces import PieceQueue, QueuedPiece
from kvtransfer.streams.stream import Stream
from kvtransfer.transports.transport import Transport
from messaging.wake import StoppedError
from protocol.errors import ProtocolError
from protocol.ids import PeerAddress, TransferOffer

logger = logging.getLogger("tandem.kvtransfer")

MAX_ATTEMPTS = 4
"""Most times that a piece is sent before its lease fails."""


@dataclass(frozen=True)
class LinkCore:
    """The state that all links of one sender share. The streams' threads call the callbacks."""

    identity: Identity
    counters: TransferCounters
    pairs: Pairs
    on_ack: Callable[[QueuedPiece, str, int], None]
    on_refused: Callable[[str, str], None]
    on_down: Callable[[Link, str], None]
    progress_timeout_s: float
    connect_timeout_s: float
    retry_interval_s: float


@dataclass(eq=False)
class Candidate:
    """One transport to the peer, and when to try it (monotonic seconds)."""

    offer: TransferOffer
    transport: Transport
    try_at: float = 0.0
    openings: int = 0
    """Number of times that it was opened since a piece was last acknowledged over it."""

    def is_hopeless(self, now: float) -> bool:
        return self.openings >= MAX_ATTEMPTS and self.try_at > now


class Link(threading.Thread):
    """A thread that keeps streams open over the first of `candidates` that works, until none works.

    A failed transport is tried again every `retry_interval_s` seconds. When it works, it takes over between
    two pieces.
    """

    def __init__(self, peer: PeerAddress, candidates: list[Candidate], core: LinkCore) -> None:
        super().__init__(name=f"kv-link-{peer.worker_id}", daemon=True)
        self.peer = peer
        self.down = False
        self.state = threading.Condition()
        self._candidates = candidates
        self._core = core
        self._queue = PieceQueue()
        self._streams: list[Stream] = []
        self._opening: Stream | None = None
        self._active: Candidate | None = None
        self._busy_since: float | None = None
        self._refused: dict[str, str] = {}
        self._reporting: set[str] = set()
        self._stopping = False
        self._reason = "the link is closing"

    @property
    def connected(self) -> bool:
        return bool(self._streams)

    @property
    def transport(self) -> str:
        """Return the transport in use, or the one tried first."""
        return (self._active or self._candidates[0]).transport.name

    @property
    def wire_dtype(self) -> str:
        """Return the dtype of values on the transport in use, or on the transport tried first."""
        return (self._active or self._candidates[0]).transport.wire_dtype

    # --- for any thread ---------------------------------------------------------------------------

    def enqueue(self, piece: QueuedPiece) -> None:
        """Queue a piece. Leases take turns. A link that has reported its failure ignores the piece."""
        with self.state:
            if self.down or piece.lease_id in self._refused:
                return
            self._queue.put(piece)
            self._wake_streams()

    def abort(self, lease_id: str, timeout_s: float) -> None:
        """Drop a lease's pieces. After this returns none of the lease's source blocks is read."""
        deadline = time.monotonic() + timeout_s
        with self.state:
            self._queue.drop(lease_id)
            self._refused.pop(lease_id, None)
            streams = list(self._streams)
            for piece in (piece for stream in streams for _, piece in stream.in_flight):
                piece.wanted = piece.wanted and piece.lease_id != lease_id
        for stream in streams:
            if not stream.let_go(lease_id, deadline):
                self._failed("abort_timeout", stream.transport_name)

    def stop(self) -> None:
        with self.state:
            self._stopping = True
            for stream in [*self._streams, *([self._opening] if self._opening else [])]:
                stream.stop()
            self.state.notify_all()

    # --- for the streams --------------------------------------------------------------------------

    def take(self, max_parts: int) -> QueuedPiece | None:
        piece = self._queue.take(max_parts)
        if piece is not None and self._busy_since is None:
            self._busy_since = time.monotonic()
        return piece

    def acknowledged(self, stream: Stream, piece: QueuedPiece, ack: Ack) -> None:
        if ack.error:
            self._failed(failure_kind(ack.error), stream.transport_name)
        with self.state:  # under one lock, so that an abort finds the piece either in flight or queued
            stream.in_flight.remove((ack.sequence, piece))
            refusals = self._settle(stream, [piece], ack.error, ack.again)
            self._count_busy(stream)
            self.state.notify_all()
        if not ack.error:
            self._candidate(stream).openings = 0
            nbytes = piece.wire_bytes
            self._core.pairs.add(
                self.peer.worker_id,
                stream.transport_name,
                {
                    "kv_transfer_bytes_total": nbytes,
                    "kv_transfer_uncoded_bytes_total": piece.num_blocks * stream.wire_block_bytes,
                    "kv_transfer_pieces_total": 1,
                    "kv_transfer_extents_total": piece.num_runs,
                    "kv_transfer_wait_seconds_total": piece.sent_at - piece.queued_at,
                },
            )
            if piece.wanted and piece.lease_id not in self._refused and not refusals:
                self._core.on_ack(piece, stream.transport_name, nbytes)
        self._report_refusals(refusals)

    def ended(self, stream: Stream, kind: str, reason: str) -> None:
        if kind:
            self._failed(kind, stream.transport_name)
        with self.state:
            pieces = [piece for _, piece in stream.in_flight]
            stream.in_flight.clear()
            self._streams.remove(stream)
            self._count_busy(stream)
            refusals = self._settle(stream, pieces, reason, again=True)
            if kind:
                self._note_failure(stream, reason)
            self.state.notify_all()
        self._report_refusals(refusals)

    def _count_busy(self, stream: Stream) -> None:
        """Add the time since the last call if some piece was in flight. Called with `state` held."""
        now, since = time.monotonic(), self._busy_since
        self._busy_since = now if any(each.in_flight for each in self._streams) else None
        if since is not None:
            self._core.pairs.add(
                self.peer.worker_id, stream.transport_name, {"kv_transfer_wire_seconds_total": now - since}
            )

    def _failed(self, kind: str, transport: str) -> None:
        self._core.counters.add(f"failures_{kind}")
        self._core.pairs.error(self.peer.worker_id, transport, kind)

    def _settle(
        self, stream: Stream, pieces: list[QueuedPiece], error: str, again: bool
    ) -> list[tuple[str, str]]:
        """Queue failed pieces again, or refuse their leases; return the final refusals.

        A lease is refused only when none of its pieces is in flight: until then its blocks may be read.
        """
        retried = []
        for piece in pieces:
            if not error or not piece.wanted:
                continue
            piece.attempts += 1
            if again and piece.attempts < MAX_ATTEMPTS and piece.lease_id not in self._refused:
                retried.append(piece)
            else:
                self._refused.setdefault(piece.lease_id, error)
                self._queue.drop(piece.lease_id)
        self._queue.put_back([piece for piece in retried if piece.lease_id not in self._refused])
        if retried:
            self._core.counters.add("pieces_sent_again", len(retried))
            self._core.pairs.add(
                self.peer.worker_id, stream.transport_name, {"kv_transfer_resent_pieces_total": len(retried)}
            )
            self._wake_streams()
        busy = {piece.lease_id for stream in self._streams for _, piece in stream.in_flight if piece.wanted}
        over = {piece.lease_id for piece in pieces} & (self._refused.keys() - busy - self._reporting)
        self._reporting |= over
        return [(lease_id, self._refused[lease_id]) for lease_id in over]

    def _note_failure(self, stream: Stream, reason: str) -> None:
        self._reason = reason
        logger.log(self._level(), "the wire to %s broke: %s", self.peer.worker_id, reason)
        self._core.pairs.refuse(self.peer.worker_id, stream.transport_name, "broken", reason)
        self._candidate(stream).try_at = time.monotonic() + self._core.retry_interval_s

    def _candidate(self, stream: Stream) -> Candidate:
        return next(each for each in self._candidates if each.transport.name == stream.transport_name)

    def _report_refusals(self, refusals: list[tuple[str, str]]) -> None:
        """Report refused leases. Pieces pushed under them meanwhile are dropped."""
        for lease_id, error in refusals:
            self._core.on_refused(lease_id, error)
            with self.state:
                self._refused.pop(lease_id, None)
                self._reporting.discard(lease_id)

    def _level(self) -> int:
        """Return the log level for a broken connection: the end of an idle link is no warning."""
        return logging.WARNING if self._active is None or self._queue else logging.DEBUG

    def _wake_streams(self) -> None:
        for stream in self._streams:
            stream.wake()

    # --- the link's own thread --------------------------------------------------------------------

    def run(self) -> None:
        try:
            while self._open_some():
                self._watch()
        except StoppedError:
            logger.debug("the link to %s is closing", self.peer.worker_id)
        except Exception as error:
            logger.exception("the link to %s ended by a defect", self.peer.worker_id)
            self._core.counters.add("failures_internal")
            self._reason = str(error)
        finally:
            self._close()

    def _open_some(self) -> bool:
        """Open streams over the best transport that works. Try recently failed transports last."""
        now, reasons = time.monotonic(), []
        hopeful = [candidate for candidate in self._candidates if not candidate.is_hopeless(now)]
        for candidate in sorted(hopeful, key=lambda candidate: candidate.try_at > now):
            reason = self._try(candidate)
            if not reason:
                return True
            reasons.append(reason)
        self._failed("connect", "")
        self._reason = "; ".join(reasons) or self._reason
        return False

    def _try(self, candidate: Candidate) -> str:
        """Open streams over the candidate, or schedule a retry. Return why it failed, or an empty string."""
        try:
            self._open(candidate)
        except (OSError, TransferError, ProtocolError) as error:
            peer, name = self.peer.worker_id, candidate.transport.name
            if self._core.pairs.refuse(peer, name, _refusal(error), str(error)):
                logger.log(self._level(), "cannot reach %s over %s: %s", peer, name, str(error))
            candidate.try_at = time.monotonic() + self._core.retry_interval_s
            self._reason = f"{name}: {error}"
            return self._reason
        return ""

    def _open(self, candidate: Candidate) -> None:
        """Open all of a transport's streams, or as many as possible. Raise the first stream's error."""
        opened: list[Stream] = []
        try:
            self._open_streams(candidate, opened)
        except BaseException:
            for stream in opened:
                stream.close()
            raise
        candidate.openings += 1
        self._log_change(candidate, len(opened))
        with self.state:
            retired, self._streams = self._streams, self._streams + opened
            self._active = candidate
            for stream in retired:
                stream.retire()
        for stream in opened:
            stream.start()

    def _open_streams(self, candidate: Candidate, opened: list[Stream]) -> None:
        for number in range(candidate.transport.streams):
            try:
                opened.append(self._open_stream(candidate))
            except (OSError, TransferError, ProtocolError) as error:
                if number == 0:
                    raise
                logger.warning("only %d streams to %s: %s", number, self.peer.worker_id, str(error))
                return

    def _open_stream(self, candidate: Candidate) -> Stream:
        core = self._core
        stream = Stream(self.peer, candidate.transport, core.identity, self, core.progress_timeout_s)
        with self.state:
            if self._stopping:
                stream.close()
                raise StoppedError
            self._opening = stream
        try:
            stream.open(candidate.offer, time.monotonic() + core.connect_timeout_s)
        finally:
            self._opening = None
        return stream

    def _log_change(self, candidate: Candidate, streams: int) -> None:
        counters, name, previous = self._core.counters, candidate.transport.name, self._active
        counters.add("connections_made", streams)
        rank, level = self._candidates.index, logging.DEBUG
        if previous is not None and rank(candidate) < rank(previous):
            level = logging.INFO
            counters.add("recoveries")
            self._core.pairs.add(self.peer.worker_id, name, {"kv_transfer_recoveries_total": 1})
        elif rank(candidate) > (rank(previous) if previous is not None else 0):
            level = logging.WARNING
            counters.add("fallbacks")
            self._core.pairs.add(self.peer.worker_id, name, {"kv_transfer_fallbacks_total": 1})
        for other in self._candidates[rank(candidate) :]:  # worse transports are not needed now
            self._core.pairs.accept(self.peer.worker_id, other.transport.name)
        why = f": {self._reason}" if level == logging.WARNING else ""
        logger.log(level, "link to %s over %s, %d streams%s", self.peer.worker_id, name, streams, why)

    def _watch(self) -> None:
        """Run until no stream is left, trying better transports from time to time. Raises StoppedError."""
        while True:
            with self.state:
                if self._stopping:
                    raise StoppedError
                if not any(not stream.retired for stream in self._streams):
                    return
                assert self._active is not None
                better = self._candidates[: self._candidates.index(self._active)]
                now = time.monotonic()
                due = [candidate for candidate in better if candidate.try_at <= now]
                if not due:
                    next_at = min((candidate.try_at for candidate in better), default=None)
                    self.state.wait(None if next_at is None else next_at - now)
                    continue
            self._try(due[0])

    def _close(self) -> None:
        with self.state:
            self.down = True
            self._queue.clear()
            streams = list(self._streams)
        for stream in streams:
            stream.stop()
        for stream in streams:
            if stream.ident is None:
                stream.close()  # the process is out of threads
            else:
                stream.join()
        self._core.on_down(self, self._reason)


def _refusal(error: Exception) -> RefusalKind:
    if isinstance(error, TransferError):
        return "refused" if isinstance(error, HandshakeRefusedError) else "unavailable"
    return "timeout" if isinstance(error, TimeoutError) else "unreachable"
