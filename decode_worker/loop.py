"""The decode worker's loop.

A prefill worker reserves blocks here, fills them under a lease and hands the request over with a manifest.
Then the request runs in this engine's batch. `DecodeRequest` lists the stages of a request; the methods below
follow the same order.
"""

from __future__ import annotations

import logging
import secrets
import time

import msgspec

from decode_worker.drafts import DraftClient
from decode_worker.request import DecodeRequest, DecodeStage
from engine.engine import Engine
from kvtransfer.blocks.layout import LayoutError, conversion_problem, foreign_format, wire_segments
from kvtransfer.interface import Closed, Failed, Progress, ReceiveEvent, SendEvent
from protocol import worker_to_worker as messages
from protocol.errors import InvalidRequestError
from protocol.handoff import HandoffManifest, ManifestMismatchError, check_manifest
from protocol.ids import PeerAddress
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import DraftPlan
from protocol.router_to_worker import Generate
from worker.adapter_loads import Problem
from worker.link import RouterLinks
from worker.loop import WorkerLoop
from worker.parts import WorkerParts
from worker.requests import RequestTable

log = logging.getLogger(__name__)


class DecodeLoop(WorkerLoop):
    """The loop for requests that prefill workers hand over, and for whole requests from the router."""

    def __init__(self, parts: WorkerParts, engine: Engine, links: RouterLinks) -> None:
        super().__init__(parts, engine, links)
        self.requests: RequestTable[DecodeRequest] = RequestTable()
        self._queue: list[DecodeRequest] = []
        """Requests in stage QUEUED, oldest first, so that long prompts get their turn."""
        self._available_at_last_try = -1
        """Numbers of available blocks when they last did not suffice for the first request of the queue."""
        self._unstepped: dict[str, DecodeRequest] = {}
        """Requests that were handed over and have not been in a step yet."""
        self._drafts: DraftClient | None = None
        if parts.remote_drafts is not None:
            self._drafts = DraftClient(
                parts.remote_drafts, self.peers, self.counters, engine.vocab_size, self.config.worker_timeout
            )

    # --- whole requests ---------------------------------------------------------------------------

    def computing(self) -> list[str]:
        return [request.request_id for request in self.requests if request.stage is DecodeStage.RUNNING]

    def start_request(self, message: Generate) -> None:
        self.engine.add(message.request)
        self.requests.insert(DecodeRequest(message.request, DecodeStage.RUNNING))

    # --- drafts of draft workers ------------------------------------------------------------------

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        request.replan(plan)
        if request.stage is DecodeStage.RUNNING:
            self.engine.replan(request_id, plan)

    def on_peer_reply(self, peer: PeerAddress, reply: messages.PeerReply) -> None:
        if isinstance(reply, messages.Drafts) and self._drafts is not None:
            self._drafts.on_drafts(peer, reply)
        else:
            super().on_peer_reply(peer, reply)

    def peers_in_use(self) -> set[str]:
        return set(self._drafts.incarnations()) if self._drafts is not None else set()

    def close(self) -> None:
        if self._drafts is not None:
            self._drafts.send()  # report the requests that ended last
        super().close()

    # --- requests of prefill workers --------------------------------------------------------------

    def on_peer_request(self, identity: bytes, request: messages.PeerRequest) -> None:
        match request:
            case messages.Reserve():
                self._on_reserve(identity, request)
            case messages.Handoff():
                self._on_handoff(identity, request.manifest)
            case messages.Release():
                self._on_release(identity, request)

    def handle(self, events: dict[object, int]) -> None:
        super().handle(events)
        self._serve_queue()

    def _is_stale(self, identity: bytes, incarnation: str, request_id: str) -> bool:
        if incarnation == self.parts.incarnation:
            return False
        self.counters.add("stale_messages_total")
        self.inbox.reply(identity, messages.Stale(request_id=request_id, incarnation=self.parts.incarnation))
        return True

    # --- QUEUED -> RESERVED -----------------------------------------------------------------------

    def _on_reserve(self, identity: bytes, message: messages.Reserve) -> None:
        if not self._is_stale(identity, message.incarnation, message.request.request_id):
            request = message.request
            self.adapter_loads.require(request, lambda problem: self._enqueue(identity, message, problem))

    def _enqueue(self, identity: bytes, message: messages.Reserve, adapter_problem: Problem | None) -> None:
        request_id = message.request.request_id
        if adapter_problem is not None:
            self._refuse(identity, request_id, *adapter_problem)
            return
        known = self.requests.get(request_id)
        if known is not None and known.stage is DecodeStage.RUNNING:
            self._on_reserve_of_running(identity, known, message)
            return
        if known is not None and known.message.prefill_incarnation == message.prefill_incarnation:
            self._on_repeated_reserve(known)
            return
        if not self.address.offers:
            self._refuse(identity, request_id, "transfer", "this worker offers no transport")
            return
        try:
            value_format = self._foreign_format(message)
        except LayoutError as error:
            self._refuse(identity, request_id, "transfer", str(error))
            return
        if known is not None:  # another prefill worker has the request now
            self._end(known)
        request = DecodeRequest(
            message.request,
            DecodeStage.QUEUED,
            reserve=message,
            identity=identity,
            foreign_format=value_format,
            asked_at=time.monotonic(),
        )
        request.num_places = self.engine.handoff.num_places(request.num_tokens)
        request.state_position = self.engine.handoff.state_position(request.num_tokens)
        request.renew(request.asked_at)
        self.requests.insert(request)
        self._queue.append(request)
        if len(self._queue) == 1:
            self._try_reserve(request)

    def _on_repeated_reserve(self, request: DecodeRequest) -> None:
        """Renew the lease of a prefill worker that repeats its `Reserve`."""
        if request.stage is DecodeStage.QUEUED:
            self.counters.add("duplicate_messages_total")
            return
        request.renew(time.monotonic())
        self._reply(request, self._grant(request))

    def _on_reserve_of_running(
        self, identity: bytes, running: DecodeRequest, message: messages.Reserve
    ) -> None:
        request_id = running.request_id
        if running.reserve is None or running.message.prefill_incarnation != message.prefill_incarnation:
            self._refuse(identity, request_id, "transfer", "the request runs here already")
        else:  # the message crossed our acknowledgement
            self.counters.add("duplicate_messages_total")

    def _foreign_format(self, message: messages.Reserve) -> str:
        """Return the format of the blocks' values after the wire's conversion. Raises `LayoutError` if they
        cannot come here.
        """
        if problem := conversion_problem(message.segments, self.engine.handoff.segments):
            raise LayoutError(*problem)
        wire = wire_segments(message.segments, message.wire_dtype)
        return foreign_format(wire, self.engine.handoff.segments)

    def _serve_queue(self) -> None:
        """Reserve blocks for the queued requests, if blocks became available since the last try."""
        while self._queue and self.engine.blocks.available != self._available_at_last_try:
            self._try_reserve(self._queue[0])

    def _try_reserve(self, request: DecodeRequest) -> None:
        """Grant the first request of the queue its blocks, refuse it for good, or leave it in the queue."""
        try:
            reservation = self.engine.reserve(request.request, request.foreign_format)
        except InvalidRequestError as error:
            self._end(request)
            self._refuse(request.identity, request.request_id, "invalid", str(error))
            return
        if reservation is None:
            self._available_at_last_try = self.engine.blocks.available
            return
        self._queue.remove(request)
        self._available_at_last_try = -1
        request.reservation = reservation
        request.enter(DecodeStage.RESERVED)
        self.requests.grant_lease(request, secrets.token_hex(8))
        if request.num_expected > 0:
            self.receiver.open(
                request.held_lease,
                reservation.extents,
                first_token=reservation.first_tokens,
                num_tokens=request.num_places,
            )
        now = time.monotonic()
        request.renew(now)
        self.counters.add("reservations_total")
        self.counters.add("reservation_wait_seconds_total", now - request.asked_at)
        self._reply(request, self._grant(request))

    def _grant(self, request: DecodeRequest) -> messages.Reserved:
        return messages.Reserved(
            request_id=request.request_id,
            lease_id=request.held_lease,
            incarnation=self.parts.incarnation,
            block_size=self.config.block_size,
            extents=request.granted.extents,
            covered=request.granted.covered,
            num_running=len(self.engine.scheduler.running),
        )

    def _reply(self, request: DecodeRequest, message: messages.PeerReply) -> None:
        self.inbox.reply(request.identity, message)

    def _refuse(self, identity: bytes, request_id: str, kind: ErrorKind, reason: str) -> None:
        self.counters.add("reservations_refused_total")
        self.inbox.reply(
            identity, messages.ReserveRefused(request_id=request_id, error_kind=kind, reason=reason)
        )

    # --- RESERVED: blocks and the manifest arrive -------------------------------------------------

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        request = self.requests.with_lease(event.lease_id)
        if request is None:
            return
        match event, request.stage:
            case Progress(), DecodeStage.RESERVED:
                request.record(event)
                request.renew(time.monotonic())
                self._run_if_complete(request)
            case Failed(), DecodeStage.RESERVED:
                self.counters.add("kv_transfer_failures_total")
                self._fail_handoff(request, event.reason)
            case Closed(), DecodeStage.CLOSING:
                self._run(request)
            case Closed(), DecodeStage.ABANDONED:
                self._free(request)

    def _on_handoff(self, identity: bytes, manifest: HandoffManifest) -> None:
        request_id, lease_id = manifest.request_id, manifest.lease_id
        if self._is_stale(identity, manifest.decode_incarnation, request_id):
            return
        request = self.requests.get(request_id)
        if request is None or request.lease_id != lease_id:
            error = "the lease is unknown here, or was given up"
            ack = messages.HandoffAck(request_id=request_id, lease_id=lease_id, error=error, field="lease_id")
            self.inbox.reply(identity, ack)
        elif request.stage is DecodeStage.RESERVED:
            self._on_manifest(request, manifest)
        else:
            self.counters.add("duplicate_messages_total")
            if request.stage is DecodeStage.RUNNING:
                self._reply(request, messages.HandoffAck(request_id=request_id, lease_id=lease_id))

    def _on_manifest(self, request: DecodeRequest, manifest: HandoffManifest) -> None:
        expected = request.expected_manifest(manifest, self.parts.incarnation)
        try:
            check_manifest(manifest, expected, self.engine.vocab_size, self.engine.feature_size)
        except ManifestMismatchError as error:
            self._fail_handoff(request, str(error), error.field)
            return
        request.manifest, request.manifest_at = manifest, time.monotonic()
        request.renew(request.manifest_at)
        self._run_if_complete(request)

    # --- RESERVED -> CLOSING -> RUNNING -----------------------------------------------------------

    def _run_if_complete(self, request: DecodeRequest) -> None:
        if not request.is_complete:
            return
        if self.receiver.close_lease(request.held_lease):
            self._run(request)
        else:
            request.enter(DecodeStage.CLOSING)

    def _run(self, request: DecodeRequest) -> None:
        """Let the engine run the request, since no transfer writes to its blocks any more."""
        assert request.manifest is not None
        request.enter(DecodeStage.RUNNING)
        request.deadline = None
        request.running_since = time.monotonic()
        self.engine.activate(
            request.granted,
            request.manifest.first_token,
            request.manifest.state_position,
            shareable=request.came_as_expected,
            draft=request.manifest.draft,
        )
        self._unstepped[request.request_id] = request
        self.counters.add("handoffs_total")
        self._reply(request, messages.HandoffAck(request_id=request.request_id, lease_id=request.held_lease))

    # --- RUNNING ----------------------------------------------------------------------------------

    def with_timing(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """Add the request's timing to the first token of each request that was handed over."""
        if not self._unstepped:
            return outputs
        return [self._with_timing(output, began) for output in outputs]

    def _with_timing(self, output: TokenOutput, began: float) -> TokenOutput:
        request = self._unstepped.pop(output.request_id, None)
        if request is None:
            return output
        return msgspec.structs.replace(output, timing=request.timing(began))

    def after_step(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self.abort(output.request_id)
        if self._drafts is not None:
            self._drafts.send()
        self._serve_queue()

    # --- -> ENDED ---------------------------------------------------------------------------------

    def _end(self, request: DecodeRequest) -> None:
        """End the request in any stage. Its blocks are freed once no transfer writes to them."""
        self.requests.release_id(request)
        match request.stage:
            case DecodeStage.QUEUED:
                self._queue.remove(request)
                self._available_at_last_try = -1
                request.enter(DecodeStage.ENDED)
            case DecodeStage.RUNNING:
                self._unstepped.pop(request.request_id, None)
                self.engine.abort(request.request_id)
                self.requests.drop_lease(request)
                request.enter(DecodeStage.ENDED)
            case DecodeStage.RESERVED | DecodeStage.CLOSING:
                if self.receiver.close_lease(request.held_lease):
                    self._free(request)
                else:
                    request.enter(DecodeStage.ABANDONED)

    def _free(self, request: DecodeRequest) -> None:
        self.requests.drop_lease(request)
        request.granted.sequence_blocks.free()
        request.enter(DecodeStage.ENDED)

    def _fail_handoff(self, request: DecodeRequest, reason: str, field: str | None = None) -> None:
        self.counters.add("handoff_failures_total")
        about = {"request_id": request.request_id}
        log.warning("hand-off of %s failed: %s", request.request_id, reason, extra=about)
        lease_id = request.held_lease
        self._end(request)
        ack = messages.HandoffAck(
            request_id=request.request_id, lease_id=lease_id, error=reason[:4096], field=field
        )
        self._reply(request, ack)

    def _on_release(self, identity: bytes, message: messages.Release) -> None:
        """End the request that the prefill worker takes back, in any stage."""
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            return
        request = self.requests.get(message.request_id)
        if request is None:
            return
        if message.lease_id == messages.ANY_LEASE:
            is_theirs = request.stage is not DecodeStage.RUNNING and request.identity == identity
        else:
            is_theirs = request.lease_id == message.lease_id
        if is_theirs:
            self.counters.add("reservations_released_total")
            self._end(request)

    def expire(self, now: float) -> None:
        if self._drafts is not None:
            self._drafts.send()
            self._drafts.expire(now)
        for request in self.requests:
            if not request.is_overdue(now):
                continue
            self.counters.add("reservations_expired_total")
            ttl_s = request.message.ttl_s
            if request.stage is DecodeStage.QUEUED:
                self._end(request)
                reason = f"no room for the prompt's KV within {ttl_s:g} s"
                self._refuse(request.identity, request.request_id, "overloaded", reason)
            else:
                worker = request.message.prefill_worker
                self.parts.pairs.add(worker, "", {"kv_transfer_leases_expired_total": 1})
                self._fail_handoff(request, f"the lease saw no progress for {ttl_s:g} s")
        self._serve_queue()
