"""The prefill worker's loop.

A request's blocks are reserved on its decode worker when the engine takes the request up, pushed as chunks
complete while the next one computes, and kept here until the decode worker has acknowledged them. When that
one fails, the router names another and the same blocks go there, or none and the request is decoded here.
"""

from __future__ import annotations

import logging
import time

from engine.engine import Engine
from kvtransfer.interface import Failed, ReceiveEvent, SendEvent
from prefill_worker.handover import REDIRECTABLE, Handover, make_manifest
from protocol.errors import TandemError
from protocol.messages import (
    EngineRequest,
    ErrorKind,
    Generate,
    Handoff,
    HandoffAck,
    HandoverFailed,
    PeerAddress,
    PeerReply,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Stale,
    TokenOutput,
)
from worker.leases import ANY_LEASE, LEASE_SHARE, RENEWALS_PER_LIFE
from worker.link import RouterLink
from worker.loop import WorkerLoop
from worker.parts import WorkerParts

log = logging.getLogger(__name__)


class PrefillLoop(WorkerLoop):
    """Prefills prompts and hands them over; serves whole requests where no decode worker is named."""

    def __init__(self, parts: WorkerParts, engine: Engine, link: RouterLink) -> None:
        super().__init__(parts, engine, link)
        self._handovers: dict[str, Handover] = {}
        self._by_lease: dict[str, Handover] = {}
        self._pushing: dict[str, Handover] = {}
        """Hand-overs with a grant and blocks still to push."""
        self._num_running_at: dict[str, int] = {}
        """By decode worker: requests that ran there when it last gave blocks."""
        engine.on_scheduled = self._on_scheduled

    # --- requests ---------------------------------------------------------------------------------

    def knows(self, request_id: str) -> bool:
        return request_id in self.computing or request_id in self._handovers

    def add(self, message: Generate) -> None:
        request, peer = message.request, message.decode
        rebuild = peer is not None and self._leaves_draft_to(peer)
        self.engine.add(request, prefill_only=peer is not None, drafts_elsewhere=rebuild)
        self.computing.add(request.request_id)
        if peer is not None:
            handover = self._handovers[request.request_id] = Handover(request, peer)
            self._connect(handover)

    def _leaves_draft_to(self, peer: PeerAddress) -> bool:
        """Whether the decode worker is to compute the draft's KV of a prompt.

        It takes as long on either side; on this one the prompts that wait are kept waiting by it, on the
        other one the requests that run.
        """
        speculative = self.config.speculative_config
        if speculative is None or speculative.prefill == "carry":
            return False
        if speculative.prefill == "rebuild":
            return True
        return self.engine.num_waiting > self._num_running_at.get(peer.worker_id, 0)

    def _connect(self, handover: Handover) -> bool:
        peer = handover.peer
        try:
            self.sender.connect(peer)
        except TandemError as error:
            self._fail_handover(handover, "transfer", f"no transfer to {peer.worker_id}: {error}")
            return False
        return True

    def abort(self, request_id: str) -> None:
        self.computing.discard(request_id)
        handover = self._forget(request_id)
        if handover is not None:
            self._release_remote(handover)
        self.engine.abort(request_id)

    def _forget(self, request_id: str) -> Handover | None:
        handover = self._handovers.pop(request_id, None)
        if handover is not None:
            self._drop_lease(handover)
        return handover

    def _drop_lease(self, handover: Handover) -> None:
        self._pushing.pop(handover.request_id, None)
        if handover.grant is not None:
            del self._by_lease[handover.grant.lease_id]
            self.sender.abort(handover.grant.lease_id)

    def _release_remote(self, handover: Handover) -> None:
        if handover.reserving:
            lease_id = handover.grant.lease_id if handover.grant is not None else ANY_LEASE
            self._send_release(handover.peer, lease_id, handover.request_id)

    def _send_release(self, peer: PeerAddress, lease_id: str, request_id: str) -> None:
        message = Release(incarnation=peer.incarnation, lease_id=lease_id, request_id=request_id)
        self.peers.send(peer, message)

    # --- failures and redirects -------------------------------------------------------------------

    def _fail_handover(self, handover: Handover, kind: ErrorKind, reason: str) -> None:
        """Ask the router for another decode worker where that may help, else fail the request."""
        peer = handover.peer
        self.counters.add("handoff_failures_total")
        log.warning("hand-off of %s to %s failed: %s", handover.request_id, peer.worker_id, reason)
        reason = f"hand-off to {peer.worker_id}: {reason}"[:4096]
        if kind not in REDIRECTABLE:
            self.fail(handover.request_id, kind, reason)
            return
        message = HandoverFailed(
            worker_id=self.parts.worker_id,
            incarnation=self.parts.incarnation,
            request_id=handover.request_id,
            decode_incarnation=peer.incarnation,
            error_kind=kind,
            reason=reason,
            manifest_sent=handover.manifest_sent,
        )
        self._leave_peer(handover)
        self.link.send(message)

    def _leave_peer(self, handover: Handover) -> None:
        """Take the request back from its decode worker; what is computed stays here."""
        self._drop_lease(handover)
        self._release_remote(handover)
        handover.leave_peer(time.monotonic() + self.config.handoff_timeout)

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        handover = self._handovers.get(request_id)
        if handover is None:
            if not self.knows(request_id):
                reason = f"{self.parts.worker_id} holds no blocks of the request any more"
                self.answer_error(request_id, "worker_lost", reason)
            return
        if not handover.awaits_redirect:
            self._leave_peer(handover)
        if decode is None:
            self._keep(handover)
            return
        log.warning("request %s is handed over to %s instead", request_id, decode.worker_id)
        self.counters.add("handoffs_redirected_total")
        handover.turn_to(decode)
        if self._connect(handover) and handover.taken_up:
            self._reserve(handover, time.monotonic())

    def _keep(self, handover: Handover) -> None:
        """Nobody takes the request over: it goes on in this worker's batch."""
        log.warning("request %s is decoded here: no decode worker takes it", handover.request_id)
        self.counters.add("handoffs_kept_total")
        del self._handovers[handover.request_id]
        self.engine.resume(handover.request_id)
        self.computing.add(handover.request_id)

    # --- reserve ----------------------------------------------------------------------------------

    def _on_scheduled(self, request: EngineRequest) -> None:
        handover = self._handovers.get(request.request_id)
        if handover is not None:
            handover.taken_up = True
            if not handover.awaits_redirect:
                self._reserve(handover, time.monotonic())

    def _reserve(self, handover: Handover, now: float) -> None:
        """Ask for blocks; asking again renews the lease."""
        ttl = self.config.handoff_timeout * LEASE_SHARE
        message = Reserve(
            incarnation=handover.peer.incarnation,
            request=handover.request,
            prefill_worker=self.parts.worker_id,
            prefill_incarnation=self.parts.incarnation,
            segments=self.engine.pool.segments,
            ttl_s=ttl,
            wire_dtype=self.sender.wire_dtype(handover.peer),
        )
        self.peers.send(handover.peer, message)
        handover.renew_at = now + ttl / RENEWALS_PER_LIFE
        if not handover.reserving:
            handover.reserving_since = now
            self._progress(handover, now)

    def _progress(self, handover: Handover, now: float) -> None:
        handover.deadline = now + self.config.handoff_timeout

    # --- the decode worker's answers --------------------------------------------------------------

    def on_peer_reply(self, peer: PeerAddress, reply: PeerReply) -> None:
        handover = self._handovers.get(reply.request_id)
        if handover is not None and handover.reserving and handover.peer.incarnation == peer.incarnation:
            self._on_reply(handover, reply)
        elif isinstance(reply, Reserved):
            self._send_release(peer, reply.lease_id, reply.request_id)

    def peers_in_use(self) -> set[str]:
        return {handover.peer.incarnation for handover in self._handovers.values()}

    def _on_reply(self, handover: Handover, reply: PeerReply) -> None:
        match reply:
            case Reserved():
                self._on_reserved(handover, reply)
            case ReserveRefused():
                self.counters.add("reservations_refused_total")
                self._fail_handover(handover, reply.error_kind, reply.reason)
            case HandoffAck():
                self._on_ack(handover, reply)
            case Stale():
                self.counters.add("stale_messages_total")
                self._fail_handover(handover, "worker_lost", "it was restarted")

    def _on_reserved(self, handover: Handover, grant: Reserved) -> None:
        if grant.lease_id in handover.left_leases:
            self.counters.add("stale_messages_total")
            return
        if handover.grant is not None:
            if grant.lease_id != handover.grant.lease_id:
                self._fail_handover(handover, "transfer", "the lease was lost")
            return
        wanted = -(-len(handover.token_ids) // grant.block_size)
        if len(grant.block_ids) != wanted or grant.cached_blocks > wanted:
            reason = f"{len(grant.block_ids)} blocks, {grant.cached_blocks} cached, where {wanted} are needed"
            self._fail_handover(handover, "transfer", f"the reservation has {reason}")
            return
        handover.grant = grant
        self._num_running_at[handover.peer.worker_id] = grant.num_running
        handover.reserve_s = time.monotonic() - handover.reserving_since
        self.counters.add("reservations_total")
        self.counters.add("kv_blocks_skipped_total", grant.cached_blocks)
        self._by_lease[grant.lease_id] = handover
        self._pushing[handover.request_id] = handover
        self._progress(handover, time.monotonic())
        self._push(handover)

    def _on_ack(self, handover: Handover, ack: HandoffAck) -> None:
        if handover.grant is None or ack.lease_id != handover.grant.lease_id:
            self.counters.add("stale_messages_total")
        elif ack.error is not None:
            self._fail_handover(handover, "transfer", ack.error)
        else:
            self.counters.add("handoffs_total")
            self.counters.add("handoff_seconds_total", time.monotonic() - handover.reserving_since)
            self.sender.settle(ack.lease_id)
            self._forget(handover.request_id)
            self.engine.release(handover.request_id)

    # --- push -------------------------------------------------------------------------------------

    def after_step(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            handover = self._handovers.get(output.request_id)
            if handover is not None:
                self._on_first_token(handover, output)
        for handover in list(self._pushing.values()):
            self._push(handover)

    def _on_first_token(self, handover: Handover, output: TokenOutput) -> None:
        self.computing.discard(handover.request_id)
        if output.finish_reason is not None:
            self._forget(handover.request_id)
            self._release_remote(handover)
            self.engine.release(handover.request_id)
        else:
            handover.first_token = output.token_ids[-1]
            if handover.reserving:
                self._progress(handover, time.monotonic())

    def _push(self, handover: Handover) -> None:
        """Queue the blocks that were computed since the last time; after the last ones, the manifest."""
        grant = handover.grant
        assert grant is not None
        final = handover.first_token is not None
        computed = self.engine.computed_blocks(handover.request_id)
        first = handover.first_pushed(self.config.block_size) + handover.num_pushed
        blocks = self.engine.block_ids(handover.request_id)[first:computed]
        if blocks:
            num_tokens = len(handover.token_ids)
            self.sender.push(handover.peer, grant.lease_id, blocks, first, num_tokens=num_tokens, final=final)
            handover.num_pushed += len(blocks)
            self.counters.add("kv_blocks_pushed_total", len(blocks))
            self._progress(handover, time.monotonic())
        if final:
            self._send_manifest(handover)

    def _send_manifest(self, handover: Handover) -> None:
        del self._pushing[handover.request_id]
        handover.manifest_sent = True
        manifest = make_manifest(
            handover,
            self.parts.worker_id,
            self.parts.incarnation,
            self.engine.pool.segments,
            self.engine.draft_state(handover.request_id),
        )
        self.peers.send(handover.peer, Handoff(manifest=manifest))

    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        if isinstance(event, Failed):
            self.counters.add("kv_transfer_failures_total")
        handover = self._by_lease.get(event.lease_id)
        if handover is None:
            return
        if isinstance(event, Failed):
            self._fail_handover(handover, "transfer", event.reason)
        else:
            self._progress(handover, time.monotonic())

    # --- deadlines --------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        for handover in list(self._handovers.values()):
            if handover.deadline is None:
                continue
            if handover.awaits_redirect:
                if now >= handover.deadline:
                    self._fail_unredirected(handover)
            elif self._waits_for_engine(handover):
                if now >= handover.renew_at:
                    self._progress(handover, now)
                    self._reserve(handover, now)
            elif now >= handover.deadline:
                self.counters.add("handoffs_expired_total")
                self.parts.pairs.add(handover.peer.worker_id, "", {"kv_transfer_leases_expired_total": 1})
                reason = f"no progress for {self.config.handoff_timeout:g} s (--handoff-timeout)"
                self._fail_handover(handover, "timeout", reason)

    def _fail_unredirected(self, handover: Handover) -> None:
        self.counters.add("handoffs_expired_total")
        limit = f"{self.config.handoff_timeout:g} s (--handoff-timeout)"
        reason = f"hand-off to {handover.peer.worker_id} failed, and no other worker was named within {limit}"
        self.fail(handover.request_id, "timeout", reason)

    def _waits_for_engine(self, handover: Handover) -> bool:
        """The decode worker has done its part so far; what is missing is the prompt's next chunk."""
        return handover.grant is not None and handover.first_token is None
