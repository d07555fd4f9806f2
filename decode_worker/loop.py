"""The decode worker's loop.

A prefill worker reserves blocks here, fills them under a lease and hands over with a manifest; from then on
the request runs in this engine's batch. Blocks are freed only after their lease is closed, when nobody can
write to them any more.
"""

from __future__ import annotations

import logging
import secrets
import time

import msgspec

from decode_worker.reservations import PendingReservation, Reservation, ReservationQueue, blocks_between
from engine.block_manager import BlockTable
from engine.engine import Engine
from kvtransfer.interface import Closed, Failed, Progress, ReceiveEvent, SendEvent
from kvtransfer.layout import LayoutError, conversion_problem, foreign_format, wire_segments
from protocol.errors import InvalidRequestError
from protocol.handoff import HandoffManifest, ManifestMismatchError, check_manifest
from protocol.ids import token_ids_digest
from protocol.messages import (
    ErrorKind,
    Generate,
    Handoff,
    HandoffAck,
    PeerRequest,
    Release,
    RequestTiming,
    Reserve,
    Reserved,
    ReserveRefused,
    Stale,
    TokenOutput,
)
from worker.leases import ANY_LEASE
from worker.link import RouterLink
from worker.loop import WorkerLoop
from worker.parts import WorkerParts

log = logging.getLogger(__name__)


class DecodeLoop(WorkerLoop):
    """Generates for requests that were handed over, and for whole requests that the router sends here."""

    def __init__(self, parts: WorkerParts, engine: Engine, link: RouterLink) -> None:
        super().__init__(parts, engine, link)
        self._queue = ReservationQueue()
        self._room_at_last_try = -1
        self._reservations: dict[str, Reservation] = {}
        self._by_lease: dict[str, Reservation] = {}
        self._ending: dict[str, Reservation | BlockTable] = {}
        """Closed leases that are still written to: reservations to take over then, or blocks to free."""
        self._taken_over: dict[str, str] = {}
        """Requests that run here after a hand-off, with the lease they came under."""
        self._unstepped: dict[str, Reservation] = {}
        """Those of them that have yet to see their first step."""

    # --- requests ---------------------------------------------------------------------------------

    def knows(self, request_id: str) -> bool:
        return request_id in self.computing or request_id in self._reservations or request_id in self._queue

    def add(self, message: Generate) -> None:
        self.engine.add(message.request)
        self.computing.add(message.request.request_id)

    def abort(self, request_id: str) -> None:
        self._queue.remove(request_id)
        reservation = self._reservations.pop(request_id, None)
        if reservation is not None and not self._close_lease(reservation):
            self._ending[reservation.lease_id] = self.engine.detach(request_id)
        self._taken_over.pop(request_id, None)
        self._unstepped.pop(request_id, None)
        self.computing.discard(request_id)
        self.engine.abort(request_id)

    def timed(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """Tell with the first token of each request that was handed over how it came here."""
        if not self._unstepped:
            return outputs
        return [self._timed(output, began) for output in outputs]

    def _timed(self, output: TokenOutput, began: float) -> TokenOutput:
        reservation = self._unstepped.pop(output.request_id, None)
        if reservation is None:
            return output
        timing = RequestTiming(transfer=reservation.timing(began))
        return msgspec.structs.replace(output, timing=timing)

    def after_step(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._taken_over.pop(output.request_id, None)
        self._serve_queue()

    # --- the prefill workers' messages ------------------------------------------------------------

    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        match request:
            case Reserve():
                self._on_reserve(identity, request)
            case Handoff():
                self._on_handoff(identity, request.manifest)
            case Release():
                self._on_release(identity, request)

    def handle(self, events: dict[object, int]) -> None:
        super().handle(events)
        self._serve_queue()

    def _is_stale(self, identity: bytes, incarnation: str, request_id: str) -> bool:
        if incarnation == self.parts.incarnation:
            return False
        self.counters.add("stale_messages_total")
        self.inbox.reply(identity, Stale(request_id=request_id, incarnation=self.parts.incarnation))
        return True

    # --- reserve ----------------------------------------------------------------------------------

    def _on_reserve(self, identity: bytes, message: Reserve) -> None:
        request_id = message.request.request_id
        if self._is_stale(identity, message.incarnation, request_id) or self._renew(identity, message):
            return
        problem = self._segment_problem(message)
        if problem is not None:
            self._refuse(identity, request_id, "transfer", problem)
            return
        pending = PendingReservation(message, identity, time.monotonic())
        if len(self._queue) > 0 or not self._try_reserve(pending):
            self._queue.push(pending)

    def _renew(self, identity: bytes, message: Reserve) -> bool:
        """The same prefill worker asking again renews its lease; another one asking replaces it."""
        request_id = message.request.request_id
        held = self._reservations.get(request_id)
        if held is not None and held.prefill_incarnation == message.prefill_incarnation:
            held.deadline = time.monotonic() + held.ttl_s
            self.inbox.reply(identity, self._grant(held))
            return True
        queued = self._queue.get(request_id)
        if request_id in self._taken_over or (queued is not None and queued.identity == identity):
            self.counters.add("duplicate_messages_total")
            return True
        if held is not None or queued is not None:
            self.abort(request_id)
        return False

    def _segment_problem(self, message: Reserve) -> str | None:
        if not self.address.offers:
            return "this worker offers no transport"
        problem = conversion_problem(message.segments, self.engine.pool.segments)
        if problem is not None:
            return f"{problem[0]}: {problem[1]}"
        try:
            self._foreign_format(message)
        except LayoutError as error:
            return str(error)
        return None

    def _foreign_format(self, message: Reserve) -> str:
        """What the wire is expected to make of the prefill worker's values. May raise LayoutError."""
        wire = wire_segments(message.segments, message.wire_dtype)
        return foreign_format(wire, self.engine.pool.segments)

    def _try_reserve(self, pending: PendingReservation) -> bool:
        """Answer the reservation if it can be answered now."""
        message = pending.message
        request = message.request
        expected_format = self._foreign_format(message)
        try:
            blocks = self.engine.reserve(request, expected_format)
        except InvalidRequestError as error:
            self._refuse(pending.identity, request.request_id, "invalid", str(error))
            return True
        if blocks is None:
            return False
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        reservation = Reservation(
            request=request,
            identity=pending.identity,
            prefill_worker=message.prefill_worker,
            prefill_incarnation=message.prefill_incarnation,
            ttl_s=message.ttl_s,
            lease_id=secrets.token_hex(8),
            block_ids=list(blocks.block_ids),
            num_cached=blocks.cached_blocks,
            num_expected=blocks_between(
                blocks.cached_blocks * self.config.block_size, num_tokens, message.segments[0].shape[2]
            ),
            segments=message.segments,
            foreign_format=expected_format,
            deadline=time.monotonic() + message.ttl_s,
        )
        self._reservations[request.request_id] = reservation
        self._by_lease[reservation.lease_id] = reservation
        if reservation.num_expected > 0:
            self.receiver.open(
                reservation.lease_id,
                reservation.block_ids,
                first_block=reservation.num_cached,
                num_tokens=num_tokens,
            )
        self.counters.add("reservations_total")
        self.counters.add("reservation_wait_seconds_total", time.monotonic() - pending.arrival)
        self.inbox.reply(pending.identity, self._grant(reservation))
        return True

    def _grant(self, reservation: Reservation) -> Reserved:
        return Reserved(
            request_id=reservation.request_id,
            lease_id=reservation.lease_id,
            incarnation=self.parts.incarnation,
            block_size=self.config.block_size,
            block_ids=reservation.block_ids,
            cached_blocks=reservation.num_cached,
            num_running=self.engine.num_running,
        )

    def _refuse(self, identity: bytes, request_id: str, kind: ErrorKind, reason: str) -> None:
        self.counters.add("reservations_refused_total")
        self.inbox.reply(identity, ReserveRefused(request_id=request_id, error_kind=kind, reason=reason))

    def _serve_queue(self) -> None:
        """Answer those who wait, in order, when room has been made since the last try."""
        head = self._queue.head()
        if head is None or self.engine.blocks.num_available == self._room_at_last_try:
            return
        while head is not None and self._try_reserve(head):
            self._queue.remove(head.message.request.request_id)
            head = self._queue.head()
        self._room_at_last_try = self.engine.blocks.num_available if head is not None else -1

    # --- hand-off ---------------------------------------------------------------------------------

    def _on_handoff(self, identity: bytes, manifest: HandoffManifest) -> None:
        request_id, lease_id = manifest.request_id, manifest.lease_id
        if self._is_stale(identity, manifest.decode_incarnation, request_id):
            return
        if self._taken_over.get(request_id) == lease_id:
            self.counters.add("duplicate_messages_total")
            self.inbox.reply(identity, HandoffAck(request_id=request_id, lease_id=lease_id))
            return
        reservation = self._by_lease.get(lease_id)
        if reservation is None or reservation.request_id != request_id:
            error = "the lease is unknown here, or was given up"
            self.inbox.reply(identity, HandoffAck(request_id=request_id, lease_id=lease_id, error=error))
            return
        try:
            self._check(reservation, manifest)
        except ManifestMismatchError as error:
            self._give_up(reservation, str(error), error.field)
            return
        reservation.manifest, reservation.manifest_at = manifest, time.monotonic()
        reservation.deadline = reservation.manifest_at + reservation.ttl_s
        self._take_over_if_complete(reservation)

    def _check(self, reservation: Reservation, manifest: HandoffManifest) -> None:
        token_ids = reservation.token_ids
        check_manifest(
            manifest,
            incarnation=self.parts.incarnation,
            token_ids_digest=token_ids_digest(token_ids),
            num_tokens=len(token_ids),
            segments=reservation.segments,
            block_ids=reservation.block_ids,
            seed=reservation.request.sampling.seed,
        )
        for field, want, got in (
            ("pushed_blocks", reservation.num_expected, manifest.pushed_blocks),
            ("prefill_incarnation", reservation.prefill_incarnation, manifest.prefill_incarnation),
        ):
            if want != got:
                raise ManifestMismatchError(field, want, got)
        if manifest.first_token >= self.engine.vocab_size:
            raise ManifestMismatchError("first_token", f"< {self.engine.vocab_size}", manifest.first_token)

    def _take_over_if_complete(self, reservation: Reservation) -> None:
        if not reservation.complete:
            return
        if self._close_lease(reservation):
            self._take_over(reservation)
        else:
            self._ending[reservation.lease_id] = reservation

    def _take_over(self, reservation: Reservation) -> None:
        assert reservation.manifest is not None
        request_id = reservation.request_id
        del self._reservations[request_id]
        manifest = reservation.manifest
        self.engine.activate(
            request_id,
            manifest.first_token,
            shareable=reservation.came_as_expected,
            draft=manifest.draft,
        )
        self.computing.add(request_id)
        self._taken_over[request_id] = reservation.lease_id
        self._unstepped[request_id] = reservation
        self.counters.add("handoffs_total")
        ack = HandoffAck(request_id=request_id, lease_id=reservation.lease_id)
        self.inbox.reply(reservation.identity, ack)

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        if isinstance(event, Closed):
            self._on_closed(event.lease_id)
            return
        reservation = self._by_lease.get(event.lease_id)
        if reservation is None:
            return
        match event:
            case Failed():
                self.counters.add("kv_transfer_failures_total")
                self._give_up(reservation, event.reason)
            case Progress():
                self._on_progress(reservation, event)

    def _on_progress(self, reservation: Reservation, event: Progress) -> None:
        reservation.num_received = event.blocks_received
        reservation.final_piece_received = event.complete
        reservation.arrival = event.arrival or reservation.arrival
        reservation.deadline = time.monotonic() + reservation.ttl_s
        self._take_over_if_complete(reservation)

    # --- the end of a reservation -----------------------------------------------------------------

    def _close_lease(self, reservation: Reservation) -> bool:
        """No write to the reservation's blocks begins after this. Whether none is under way either."""
        self._by_lease.pop(reservation.lease_id, None)
        self._ending.pop(reservation.lease_id, None)
        return self.receiver.close_lease(reservation.lease_id)

    def _on_closed(self, lease_id: str) -> None:
        ending = self._ending.pop(lease_id, None)
        if isinstance(ending, Reservation):
            self._take_over(ending)
        elif ending is not None:
            self.engine.blocks.free(ending)

    def _give_up(self, reservation: Reservation, reason: str, field: str | None = None) -> None:
        self.counters.add("handoff_failures_total")
        log.warning("hand-off of %s failed: %s", reservation.request_id, reason)
        self.abort(reservation.request_id)
        ack = HandoffAck(
            request_id=reservation.request_id, lease_id=reservation.lease_id, error=reason[:4096], field=field
        )
        self.inbox.reply(reservation.identity, ack)

    def _on_release(self, identity: bytes, message: Release) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            return
        if self._holds(identity, message.request_id, message.lease_id):
            self.counters.add("reservations_released_total")
            self.abort(message.request_id)

    def _holds(self, identity: bytes, request_id: str, lease_id: str) -> bool:
        """Whether the request has this lease here, or for `ANY_LEASE` any claim of this prefill worker."""
        claim = self._reservations.get(request_id) or self._queue.get(request_id)
        if lease_id == ANY_LEASE:
            return claim is not None and claim.identity == identity
        ends = isinstance(self._ending.get(lease_id), Reservation)
        return ends or lease_id in self._by_lease or self._taken_over.get(request_id) == lease_id

    def expire(self, now: float) -> None:
        for pending in self._queue.expired(now):
            self._queue.remove(pending.message.request.request_id)
            self.counters.add("reservations_expired_total")
            reason = f"no room for the prompt's KV within {pending.message.ttl_s:g} s"
            self._refuse(pending.identity, pending.message.request.request_id, "overloaded", reason)
        for reservation in list(self._reservations.values()):
            if now >= reservation.deadline:
                self.counters.add("reservations_expired_total")
                self.parts.pairs.add(reservation.prefill_worker, "", {"kv_transfer_leases_expired_total": 1})
                self._give_up(reservation, f"the lease saw no progress for {reservation.ttl_s:g} s")
        self._serve_queue()
