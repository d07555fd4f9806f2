"""The prefill worker's loop.

A request's blocks are reserved on its decode worker when the engine takes the request up, pushed as chunks
complete while the next one computes, and kept here until the decode worker has acknowledged them.
"""

from __future__ import annotations

import logging
import time

from engine.engine import Engine
from kvtransfer.interface import Completed, Failed
from kvtransfer.sender import Sender
from prefill_worker.handover import Handover, make_manifest
from prefill_worker.peers import PeerLinks
from protocol.errors import TandemError
from protocol.messages import (
    EngineRequest,
    ErrorKind,
    Generate,
    Handoff,
    HandoffAck,
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
        assert parts.pool is not None
        self._sender = Sender(
            parts.pool,
            key=parts.keys.transfer_key,
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            transports=parts.wires,
            checksum=self.config.kv_checksum,
            on_event=parts.wake.set,
        )
        parts.transports = self._sender.transports
        parts.transfer_counters = self._sender.counters
        self._peers = PeerLinks(parts, self.poller)
        self._handovers: dict[str, Handover] = {}
        self._by_lease: dict[str, Handover] = {}
        self._pushing: dict[str, Handover] = {}
        """Hand-overs with a grant and blocks still to push."""
        self.address = PeerAddress(
            worker_id=parts.worker_id, incarnation=parts.incarnation, control=f"none:{parts.worker_id}"
        )
        engine.on_scheduled = self._on_scheduled

    # --- requests ---------------------------------------------------------------------------------

    def knows(self, request_id: str) -> bool:
        return request_id in self.computing or request_id in self._handovers

    def add(self, message: Generate) -> None:
        request, peer = message.request, message.decode
        self.engine.add(request, prefill_only=peer is not None)
        self.computing.add(request.request_id)
        if peer is not None:
            self._handovers[request.request_id] = Handover(request, peer)
            self._connect(request.request_id, peer)

    def _connect(self, request_id: str, peer: PeerAddress) -> None:
        try:
            self._sender.connect(peer)
        except TandemError as error:
            self.fail(request_id, "transfer", f"no transfer to {peer.worker_id}: {error}")

    def abort(self, request_id: str) -> None:
        self.computing.discard(request_id)
        handover = self._forget(request_id)
        if handover is not None:
            self._release_remote(handover)
        self.engine.abort(request_id)

    def _forget(self, request_id: str) -> Handover | None:
        handover = self._handovers.pop(request_id, None)
        self._pushing.pop(request_id, None)
        if handover is not None and handover.grant is not None:
            del self._by_lease[handover.grant.lease_id]
            self._sender.abort(handover.grant.lease_id)
        return handover

    def _release_remote(self, handover: Handover) -> None:
        if handover.reserving:
            lease_id = handover.grant.lease_id if handover.grant is not None else ANY_LEASE
            self._send_release(handover.peer, lease_id, handover.request_id)

    def _send_release(self, peer: PeerAddress, lease_id: str, request_id: str) -> None:
        message = Release(incarnation=peer.incarnation, lease_id=lease_id, request_id=request_id)
        self._peers.send(peer, message)

    def _fail_handover(self, handover: Handover, kind: ErrorKind, reason: str) -> None:
        self.counters.add("handoff_failures_total")
        log.warning("hand-off of %s to %s failed: %s", handover.request_id, handover.peer.worker_id, reason)
        self.fail(handover.request_id, kind, f"hand-off to {handover.peer.worker_id}: {reason}")

    # --- reserve ----------------------------------------------------------------------------------

    def _on_scheduled(self, request: EngineRequest) -> None:
        handover = self._handovers.get(request.request_id)
        if handover is not None and not handover.reserving:
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
        )
        self._peers.send(handover.peer, message)
        handover.renew_at = now + ttl / RENEWALS_PER_LIFE
        if not handover.reserving:
            handover.reserving_since = now
            self._progress(handover, now)

    def _progress(self, handover: Handover, now: float) -> None:
        handover.deadline = now + self.config.handoff_timeout

    # --- the decode worker's answers --------------------------------------------------------------

    def handle_peers(self, events: dict[object, int]) -> None:
        for peer, reply in self._peers.receive(events):
            handover = self._handovers.get(reply.request_id)
            if handover is not None and handover.peer.incarnation == peer.incarnation:
                self._on_reply(handover, reply)
            elif isinstance(reply, Reserved):
                self._send_release(peer, reply.lease_id, reply.request_id)

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
            self._sender.push(
                handover.peer, grant.lease_id, blocks, first, num_tokens=num_tokens, final=final
            )
            handover.num_pushed += len(blocks)
            self.counters.add("kv_blocks_pushed_total", len(blocks))
            self._progress(handover, time.monotonic())
        if final:
            self._send_manifest(handover)

    def _send_manifest(self, handover: Handover) -> None:
        del self._pushing[handover.request_id]
        manifest = make_manifest(
            handover, self.parts.worker_id, self.parts.incarnation, self.engine.pool.segments
        )
        self._peers.send(handover.peer, Handoff(manifest=manifest))

    def handle_transfers(self) -> None:
        now = time.monotonic()
        for event in self._sender.poll():
            handover = self._by_lease.get(event.lease_id)
            match event:
                case Completed():
                    self.counters.add("kv_transfers_total")
                    self.counters.add("kv_transfer_bytes_total", event.nbytes)
                    self.counters.add("kv_transfer_seconds_total", event.seconds)
                    self.counters.add("kv_transfer_busy_seconds_total", event.busy_s)
                    self.counters.add("kv_transfer_hidden_seconds_total", event.hidden_s)
                    self.counters.add("kv_transfer_wait_seconds_total", event.wait_s)
                    self.counters.add("kv_transfer_extents_total", event.num_extents)
                case Failed():
                    self.counters.add("kv_transfer_failures_total")
            if handover is None:
                continue
            if isinstance(event, Failed):
                self._fail_handover(handover, "transfer", event.reason)
            else:
                self._progress(handover, now)

    # --- deadlines --------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        for handover in list(self._handovers.values()):
            if handover.deadline is None:
                continue
            if self._waits_for_engine(handover):
                if now >= handover.renew_at:
                    self._progress(handover, now)
                    self._reserve(handover, now)
            elif now >= handover.deadline:
                self.counters.add("handoffs_expired_total")
                reason = f"no progress for {self.config.handoff_timeout:g} s (--handoff-timeout)"
                self._fail_handover(handover, "timeout", reason)
        self._peers.close_idle(now, {handover.peer.incarnation for handover in self._handovers.values()})

    def _waits_for_engine(self, handover: Handover) -> bool:
        """The decode worker has done its part so far; what is missing is the prompt's next chunk."""
        return handover.grant is not None and handover.first_token is None

    def close(self) -> None:
        self._sender.close()
        self._peers.close()
