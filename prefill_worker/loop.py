"""The prefill worker's loop.

The loop asks a request's decode worker for blocks when the engine begins with the prompt, pushes each
computed chunk of KV while the next one computes, and keeps the blocks here until the decode worker has
acknowledged them. If that decode worker fails, the router names another one, which gets the same blocks. If
the router names none, the request is decoded here. `PrefillRequest` lists the stages of a request; the
methods below follow the same order.
"""

from __future__ import annotations

import logging
import operator
import time

from engine.engine import Engine
from kvtransfer.interface import Completed, Failed, ReceiveEvent, SendEvent
from prefill_worker.request import PrefillRequest, PrefillStage
from protocol import worker_to_worker as messages
from protocol.errors import TandemError
from protocol.ids import PeerAddress
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import EngineRequest
from protocol.router_to_worker import Generate
from protocol.worker_to_router import HandoverFailed
from worker.link import RouterLinks
from worker.loop import WorkerLoop
from worker.parts import WorkerParts
from worker.requests import RequestTable

log = logging.getLogger(__name__)

LEASE_SHARE = 0.9
"""A lease's life as a share of our timeout: the decode worker should fail first, since it knows the cause."""

RENEWALS_PER_LIFE = 3
"""Number of renewals within a lease's life while its prompt waits for the next chunk."""

REDIRECTABLE: tuple[ErrorKind, ...] = ("worker_lost", "overloaded", "transfer", "timeout")
"""Kinds of failures after which another decode worker may succeed."""


class PrefillLoop(WorkerLoop):
    """Prefills prompts and hands them over; serves requests without a decode worker to their end."""

    def __init__(self, parts: WorkerParts, engine: Engine, links: RouterLinks) -> None:
        super().__init__(parts, engine, links)
        self.requests: RequestTable[PrefillRequest] = RequestTable()
        self._pushing: dict[str, PrefillRequest] = {}
        """Requests in stage PUSHING; every step may compute blocks for them."""
        self._num_running_at: dict[str, int] = {}
        """Number of requests that ran on each decode worker when it last granted blocks."""

    def knows(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.stage is not PrefillStage.SETTLING

    def computing(self) -> list[str]:
        own = (each for each in self.requests if each.stage is PrefillStage.WHOLE or each.first_token is None)
        return [request.request_id for request in own]

    def peers_in_use(self) -> set[str]:
        return {request.peer.incarnation for request in self.requests if request.peer is not None}

    # --- -> WHOLE or ASSIGNED ---------------------------------------------------------------------

    def start_request(self, message: Generate) -> None:
        peer = message.decode
        self.abort(message.request.request_id)  # an earlier run of the request may still be settling
        rebuild = peer is not None and self._leaves_draft_to(peer)
        self.engine.add(message.request, prefill_only=peer is not None, drafts_elsewhere=rebuild)
        request = PrefillRequest(message.request, PrefillStage.ASSIGNED if peer else PrefillStage.WHOLE, peer)
        self.requests.insert(request)
        if peer is not None:
            self._connect(request)

    def _leaves_draft_to(self, peer: PeerAddress) -> bool:
        """Return whether the decode worker should compute the draft model's KV of a prompt.

        Both workers take equally long. Here it delays waiting prompts, there running requests.
        """
        speculative = self.config.speculative_config
        if speculative is None or speculative.prefill == "carry":
            return False
        if speculative.prefill == "rebuild":
            return True
        return len(self.engine.scheduler.waiting) > self._num_running_at.get(peer.worker_id, 0)

    def _connect(self, request: PrefillRequest) -> bool:
        try:
            self.sender.connect(request.decode)
        except TandemError as error:
            reason = f"no transfer to {request.decode.worker_id}: {error}"
            self._fail_handover(request, "transfer", reason)
            return False
        return True

    # --- ASSIGNED -> RESERVING -> PUSHING ---------------------------------------------------------

    def before_step(self, first_time: list[EngineRequest]) -> None:
        now = time.monotonic()
        for scheduled in first_time:
            request = self.requests.get(scheduled.request_id)
            if request is not None:
                request.taken_up = True
                if request.stage is PrefillStage.ASSIGNED:
                    self._reserve(request, now)

    def _reserve(self, request: PrefillRequest, now: float) -> None:
        """Ask the decode worker for blocks; the same message renews the lease later."""
        ttl = self.config.handoff_timeout * LEASE_SHARE
        message = messages.Reserve(
            incarnation=request.decode.incarnation,
            request=request.request,
            prefill_worker=self.parts.worker_id,
            prefill_incarnation=self.parts.incarnation,
            segments=self.engine.handoff.segments,
            ttl_s=ttl,
            wire_dtype=self.sender.wire_dtype(request.decode),
        )
        self.peers.send(request.decode, message)
        request.renew_at = now + ttl / RENEWALS_PER_LIFE
        self._extend_deadline(request, now)
        if request.stage is PrefillStage.ASSIGNED:
            request.enter(PrefillStage.RESERVING)
            request.reserving_since = now

    def _extend_deadline(self, request: PrefillRequest, now: float) -> None:
        request.deadline = now + self.config.handoff_timeout

    def on_peer_reply(self, peer: PeerAddress, reply: messages.PeerReply) -> None:
        if isinstance(reply, messages.Drafts):
            super().on_peer_reply(peer, reply)
            return
        request = self.requests.get(reply.request_id)
        if request is not None and request.has_asked and request.decode.incarnation == peer.incarnation:
            self._on_reply(request, reply)
        elif isinstance(reply, messages.Reserved) and self.requests.with_lease(reply.lease_id) is None:
            self._send_release(peer, reply.lease_id, reply.request_id)

    def _on_reply(self, request: PrefillRequest, reply: messages.PeerReply) -> None:
        match reply:
            case messages.Reserved():
                self._on_reserved(request, reply)
            case messages.ReserveRefused():
                self.counters.add("reservations_refused_total")
                self._fail_handover(request, reply.error_kind, reply.reason)
            case messages.HandoffAck():
                self._on_ack(request, reply)
            case messages.Stale():
                self.counters.add("stale_messages_total")
                self._fail_handover(request, "worker_lost", "it was restarted")

    def _on_reserved(self, request: PrefillRequest, grant: messages.Reserved) -> None:
        if grant.lease_id in request.left_leases:
            self.counters.add("stale_messages_total")
            return
        if request.stage is not PrefillStage.RESERVING:
            if grant.lease_id != request.lease_id:
                self._fail_handover(request, "transfer", "the lease was lost")
            return
        wanted = -(-self.engine.handoff.num_places(request.num_tokens) // grant.block_size)
        needed = [(table, wanted) for table in range(self.engine.pool.num_tables)]
        granted = [(extent.block_pool, len(extent.blocks)) for extent in grant.extents]
        if granted != needed or grant.covered > request.num_tokens:
            reason = f"(table, blocks) {granted}, {grant.covered} tokens covered, where {needed} are needed"
            self._fail_handover(request, "transfer", f"the reservation has {reason}")
            return
        now = time.monotonic()
        request.enter(PrefillStage.PUSHING)
        request.grant = grant
        request.places = self.engine.handoff.firsts(request.num_tokens, grant.covered)
        request.reserve_s = now - request.reserving_since
        self.requests.grant_lease(request, grant.lease_id)
        self._pushing[request.request_id] = request
        self._num_running_at[request.decode.worker_id] = grant.num_running
        self.counters.add("reservations_total")
        self.counters.add("kv_blocks_skipped_total", grant.covered // grant.block_size)
        self._extend_deadline(request, now)
        self._push(request)

    # --- PUSHING -> SENT --------------------------------------------------------------------------

    def after_step(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            request = self.requests.get(output.request_id)
            if request is None:
                continue
            if output.finish_reason is not None:
                self._end(request)
            elif request.stage is not PrefillStage.WHOLE:
                self._on_first_token(request, output.token_ids[-1])
        for request in list(self._pushing.values()):
            self._push(request)

    def _on_first_token(self, request: PrefillRequest, token: int) -> None:
        request.first_token = token
        if request.has_asked:
            self._extend_deadline(request, time.monotonic())

    def _push(self, request: PrefillRequest) -> None:
        """Queue the blocks computed since the last call; after the last blocks, send the manifest."""
        final = request.first_token is not None
        extents = self.engine.computed(request.request_id, request.places)
        num_blocks = sum(len(extent.blocks) for extent in extents)
        if num_blocks:
            num_places = self.engine.handoff.num_places(request.num_tokens)
            self.sender.push(
                request.decode, request.held_lease, extents, request.places, num_places, final=final
            )
            lengths = [len(extent.blocks) for extent in extents]
            request.places = list(map(operator.add, request.places, lengths))
            request.num_pushed += num_blocks
            self.counters.add("kv_blocks_pushed_total", num_blocks)
            self._extend_deadline(request, time.monotonic())
        if final:
            self._send_manifest(request)

    def _send_manifest(self, request: PrefillRequest) -> None:
        del self._pushing[request.request_id]
        request.enter(PrefillStage.SENT)
        request.delivered = request.num_pushed == 0
        manifest = request.manifest(
            self.parts.worker_id,
            self.parts.incarnation,
            self.engine.handoff.segments,
            self.engine.handoff.state_position(request.num_tokens),
            self.engine.draft_state(request.request_id),
        )
        self.peers.send(request.decode, messages.Handoff(manifest=manifest))

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        if isinstance(event, Failed):
            self.counters.add("kv_transfer_failures_total")
        request = self.requests.with_lease(event.lease_id)
        if request is None:
            return
        request.delivered = isinstance(event, Completed)
        if request.stage is PrefillStage.SETTLING:
            if isinstance(event, Completed | Failed):
                self._end(request)
        elif isinstance(event, Failed):
            self._fail_handover(request, "transfer", event.reason)
        else:
            self._extend_deadline(request, time.monotonic())

    # --- SENT -> SETTLING -> ENDED ----------------------------------------------------------------

    def _on_ack(self, request: PrefillRequest, ack: messages.HandoffAck) -> None:
        if ack.lease_id != request.lease_id or (ack.error is None and request.stage is not PrefillStage.SENT):
            self.counters.add("stale_messages_total")
        elif ack.error is not None:
            self._fail_handover(request, "transfer", ack.error)
        else:
            now = time.monotonic()
            self.counters.add("handoffs_total")
            self.counters.add("handoff_seconds_total", now - request.reserving_since)
            request.enter(PrefillStage.SETTLING)
            self._extend_deadline(request, now)
            if request.delivered:
                self._end(request)

    def _end(self, request: PrefillRequest) -> None:
        """Free all that the request holds, here and on its decode worker."""
        self._take_back(request)
        self.requests.release_id(request)
        self.engine.abort(request.request_id)
        request.enter(PrefillStage.ENDED)

    def _take_back(self, request: PrefillRequest) -> None:
        """Stop the transfer. The decode worker drops the request, unless it already runs it."""
        self._pushing.pop(request.request_id, None)
        lease_id = request.lease_id
        if lease_id is not None:
            self.sender.abort(lease_id)
            self.requests.drop_lease(request)
            request.left_leases.add(lease_id)
        if request.has_asked:
            self._send_release(request.decode, lease_id or messages.ANY_LEASE, request.request_id)

    def _send_release(self, peer: PeerAddress, lease_id: str, request_id: str) -> None:
        message = messages.Release(incarnation=peer.incarnation, lease_id=lease_id, request_id=request_id)
        self.peers.send(peer, message)

    # --- -> REDIRECTING -> ASSIGNED or WHOLE ------------------------------------------------------

    def _fail_handover(self, request: PrefillRequest, kind: ErrorKind, reason: str) -> None:
        """Ask the router for another decode worker if that may help, else fail the request."""
        peer = request.decode
        self.counters.add("handoff_failures_total")
        about = {"request_id": request.request_id}
        ids = (request.request_id, peer.worker_id)
        log.warning("hand-off of %s to %s failed: %s", *ids, reason, extra=about)
        reason = f"hand-off to {peer.worker_id}: {reason}"[:4096]
        if kind not in REDIRECTABLE:
            self.fail(request.request_id, kind, reason)
            return
        message = HandoverFailed(
            worker_id=self.parts.worker_id,
            incarnation=self.parts.incarnation,
            request_id=request.request_id,
            decode_incarnation=peer.incarnation,
            error_kind=kind,
            reason=reason,
            manifest_sent=request.stage is PrefillStage.SENT,
        )
        self._leave_peer(request)
        self.links.send(request.request_id, message)

    def _leave_peer(self, request: PrefillRequest) -> None:
        """Take the request back from its decode worker; the computed blocks stay here."""
        self._take_back(request)
        request.leave_peer(time.monotonic() + self.config.handoff_timeout)

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        request = self.requests.get(request_id)
        if request is None or request.stage is PrefillStage.SETTLING:
            reason = f"{self.parts.worker_id} holds no blocks of the request any more"
            self.answer_error(request_id, "worker_lost", reason)
            return
        if request.stage is PrefillStage.WHOLE:
            return
        if request.stage is not PrefillStage.REDIRECTING:
            self._leave_peer(request)
        request.peer, request.deadline = decode, None
        if decode is None:
            self._keep(request)
            return
        about = {"request_id": request_id}
        log.warning("request %s is handed over to %s instead", request_id, decode.worker_id, extra=about)
        self.counters.add("handoffs_redirected_total")
        request.enter(PrefillStage.ASSIGNED)
        if self._connect(request) and request.taken_up:
            self._reserve(request, time.monotonic())

    def _keep(self, request: PrefillRequest) -> None:
        """Decode the request in this worker's batch, because no decode worker can take it."""
        about = {"request_id": request.request_id}
        log.warning("request %s is decoded here: no decode worker takes it", request.request_id, extra=about)
        self.counters.add("handoffs_kept_total")
        request.enter(PrefillStage.WHOLE)
        self.engine.resume(request.request_id)

    # --- deadlines --------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        for request in self.requests:
            if request.waits_for_engine:
                if now >= request.renew_at:
                    self._reserve(request, now)
            elif request.is_overdue(now):
                self._on_overdue(request)

    def _on_overdue(self, request: PrefillRequest) -> None:
        if request.stage is PrefillStage.SETTLING:
            self._end(request)
            return
        self.counters.add("handoffs_expired_total")
        peer, limit = request.decode.worker_id, f"{self.config.handoff_timeout:g} s (--handoff-timeout)"
        if request.stage is PrefillStage.REDIRECTING:
            reason = f"hand-off to {peer} failed, and no other worker was named within {limit}"
            self.fail(request.request_id, "transfer", reason)
        else:
            self.parts.pairs.add(peer, "", {"kv_transfer_leases_expired_total": 1})
            self._fail_handover(request, "timeout", f"no progress for {limit}")
