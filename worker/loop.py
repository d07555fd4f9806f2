"""The engine loop: one thread that polls sockets, steps the engine and sends what the step made.

It blocks while there is nothing to do, never sleeps while there is, and adds little to a step: one poll, one
message to the router, and what the role does with its transfers.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec
import zmq

from engine.engine import Engine
from engine.parallel.group import LostRankError
from kvtransfer.interface import ReceiveEvent, SendEvent
from protocol.errors import InvalidRequestError, TandemError
from protocol.ids import peer_identity
from protocol.outputs import ErrorKind, TokenOutput
from protocol.peers import PeerAddress
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import (
    Abort,
    CallRoll,
    Generate,
    Leave,
    PeerGone,
    Peers,
    Prefetch,
    PrepareToLeave,
    Redirect,
    Registered,
    Replan,
    ReplayKvEvents,
    RouterToWorker,
    Unregistered,
)
from protocol.worker_to_router import Absent, Prefetched
from protocol.worker_to_worker import Fetch, FetchRefused, Lent, PeerReply, PeerRequest
from worker.departure import Departure
from worker.fetch import PrefixFetcher, PrefixHolder, refused
from worker.kv_events import KvEventSender
from worker.link import RouterLink, RouterLinks
from worker.parts import WorkerParts
from worker.peer_links import PeerLinks
from worker.peer_socket import PeerSocket
from worker.router_leases import RouterLeases
from worker.transfers import open_transfers

log = logging.getLogger(__name__)

HOUSEKEEPING_INTERVAL_S = 0.25
MAX_FAILED_STEPS = 3
"""Steps that may fail in a row before the worker gives up, so that its supervisor starts a fresh one."""


class BrokenEngineError(TandemError):
    """The engine fails step after step, or its device is in an unknown state."""


class WorkerLoop(ABC):
    """What both roles do. Everything but `stop` runs in the thread that called `run`.

    `address` is how other workers reach this one: `inbox` takes their requests, `receiver` their blocks. What
    this one asks of others goes through `peers`, its own blocks through `sender`.
    """

    def __init__(self, parts: WorkerParts, engine: Engine, links: RouterLinks) -> None:
        self.parts = parts
        self.config = parts.config
        self.counters = parts.counters
        self.engine = engine
        self.links = links
        self._router_leases = RouterLeases(links, parts.config.worker_timeout)
        self.poller = zmq.Poller()
        for socket in links.sockets:
            self.poller.register(socket, zmq.POLLIN)
        self.poller.register(parts.wake.fileno(), zmq.POLLIN)
        self.inbox = PeerSocket(parts)
        self.poller.register(self.inbox.socket, zmq.POLLIN)
        self.peers = PeerLinks(parts, self.poller)
        self.sender, self.receiver = open_transfers(parts)
        self.address = PeerAddress(
            worker_id=parts.worker_id,
            incarnation=parts.incarnation,
            control=self.inbox.endpoint,
            offers=self.receiver.offers,
        )
        self._fetcher = PrefixFetcher(self.address, engine, self.receiver, self.peers, self.counters)
        self._holder = PrefixHolder(engine, self.sender, self.counters)
        self.outbox: list[TokenOutput] = []
        self._kv_events: KvEventSender | None = None
        if parts.tells_of_cache:
            self._kv_events = KvEventSender(parts, engine.blocks, links, parts.kv_publisher)
        self._stop = threading.Event()
        self.departure = Departure(parts, links, self.stop)
        self._advancing = True
        """False after a step that had nothing to run: then the loop waits for a message in its poll."""
        self._failed_steps = 0
        self._next_housekeeping = 0.0

    # --- the role's part --------------------------------------------------------------------------

    @abstractmethod
    def start_request(self, message: Generate) -> None:
        """Give a new request to the engine. May raise `InvalidRequestError`."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request, whatever its stage. Unknown ids are ignored."""

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        """Hand a request over to another decode worker, or to nobody. For prefill workers only."""
        self.counters.add("dropped_messages_total")

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Have the request's drafts made elsewhere. For decode workers only."""
        self.counters.add("dropped_messages_total")

    def peer_gone(self, peer: bytes) -> None:
        """Free what is held for another worker, known by this identity. For draft workers only."""
        self.counters.add("dropped_messages_total")

    @abstractmethod
    def knows(self, request_id: str) -> bool:
        """Whether the request is under way here."""

    @abstractmethod
    def under_way(self) -> list[str]:
        """The requests that hold something here, in whatever stage."""

    @abstractmethod
    def computing(self) -> list[str]:
        """The requests that the engine still has to compute something for."""

    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        """Another worker asks for something that only one of this role can give."""
        self.counters.add("dropped_messages_total")
        log.warning("dropped a message that is not for a %s worker", self.parts.role.name)

    def on_peer_reply(self, peer: PeerAddress, reply: PeerReply) -> None:
        """An answer to what the role asked another worker for."""
        self.counters.add("stale_messages_total")

    @abstractmethod
    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Something happened to one of the role's leases."""

    def peers_in_use(self) -> set[str]:
        """The incarnations that the role awaits something from."""
        return set()

    def before_step(self, first_time: list[EngineRequest]) -> None:
        """The engine takes these requests up, for the first time, in the step that runs next."""
        return

    def with_timing(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """The outputs of a step that began then (monotonic seconds), with how their requests came here."""
        return outputs

    def deliver(self, outputs: list[TokenOutput]) -> None:
        """Send what a step made to the router."""
        self.outbox += outputs
        self._flush()

    @abstractmethod
    def after_step(self, outputs: list[TokenOutput]) -> None:
        """The outputs are with the router; do what follows from them."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Give up whatever passed its deadline. `now` is `time.monotonic()`."""

    # --- the loop ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the loop after its current step. Any thread may call it."""
        self._stop.set()
        self.parts.wake.set()

    def run(self) -> None:
        """Serve until `stop`. Raises `BrokenEngineError` or `LostRankError` when a fresh process is the only
        remedy.
        """
        try:
            self._tell_kv_events()
            while not self._stop.is_set():
                self._turn()
            if self.departure.next_role is not None:
                self.abort_all(self.under_way())  # of routers that are gone
        finally:
            self.close()

    def close(self) -> None:
        """Close all transfers, and the sockets towards other workers."""
        self.sender.close()
        self.receiver.close()
        self.peers.close()
        self.inbox.close()

    def _turn(self) -> None:
        busy = self._advancing and self.engine.has_work()
        if not busy and self.parts.cores is not None:
            self.parts.cores.idle()
        timeout_ms = 0 if busy else int(HOUSEKEEPING_INTERVAL_S * 1000)
        events = dict(self.poller.poll(timeout_ms))
        started = time.perf_counter()
        if events:
            self.handle(events)
        stepped = self._step() if self.engine.has_work() else 0.0
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_INTERVAL_S
            self._keep_house(now)
        if self.outbox:
            self._flush()
        self._tell_kv_events()
        self.counters.add("loop_seconds_total", time.perf_counter() - started - stepped)

    def handle(self, events: dict[object, int]) -> None:
        """Take all messages that have arrived. `events` is what the poll returned."""
        for link in self.links:
            if link.socket in events:
                for message in link.receive():
                    self._on_router_message(message, link)
        if self.parts.wake.fileno() in events:
            self.parts.wake.clear()
            self._handle_transfers()
        self._handle_peers(events)

    def _handle_transfers(self) -> None:
        for received in self.receiver.poll():
            if not self._fetcher.on_event(received):
                self.on_transfer(received)
        for sent in self.sender.poll():
            if not self._holder.on_event(sent):
                self.on_transfer(sent)

    def _handle_peers(self, events: dict[object, int]) -> None:
        if self.inbox.socket in events:
            self.take_peer_requests()
        for peer, reply in self.peers.receive(events):
            match reply:
                case Lent():
                    self._fetcher.on_lent(reply)
                case FetchRefused():
                    self._fetcher.on_refused(reply.request_id, reply.lease_id, reply.reason)
                case _:
                    self.on_peer_reply(peer, reply)

    def take_peer_requests(self) -> None:
        """All that have arrived."""
        for identity, request in self.inbox.receive():
            if isinstance(request, Fetch):
                self._on_fetch(identity, request)
            else:
                self.on_peer_request(identity, request)

    def _on_fetch(self, identity: bytes, message: Fetch) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            self.inbox.reply(identity, refused(message, "it was restarted"))
        elif (answer := self._holder.lend(message)) is not None:
            self.inbox.reply(identity, answer)

    def _keep_house(self, now: float) -> None:
        self.departure.advance(now)
        self._end_orphans(now)
        self._fetcher.expire(now)
        self.expire(now)
        self.peers.close_idle(now, self.peers_in_use() | self._fetcher.holders())
        if self.engine.tiers is not None and not self.engine.has_work():
            self.engine.tiers.poll()

    def _end_orphans(self, now: float) -> None:
        """Free what requests hold whose router is gone. Should it come back after all, it is told."""
        if len(self.links) == 1:
            return
        held = {*self.under_way(), *(fetch.request_id for fetch in self._fetcher.fetches)}
        orphans = self._router_leases.expired(held, now)
        if not orphans:
            return
        limit = self.config.worker_timeout
        log.warning("%d requests are ended: their router has been gone for %g s", len(orphans), limit)
        self.counters.add("orphaned_requests_total", len(orphans))
        for request_id in orphans:
            self._fetcher.abort(request_id)
            self.fail(request_id, "worker_lost", f"its router was not connected for {limit:g} s")

    def _step(self) -> float:
        """One engine step; returns the seconds that the engine took."""
        began, started = time.monotonic(), time.perf_counter()
        if self.parts.cores is not None and self.parts.cores.begin_step():
            self.counters.add("lent_core_steps_total")
        try:
            step = self.engine.schedule()
            if step.first_time:
                self.before_step(step.first_time)
            result = self.engine.run(step)
        except LostRankError:
            raise
        except Exception:
            log.exception("an engine step failed")
            self._on_failed_step()
            return time.perf_counter() - started
        seconds = time.perf_counter() - started
        self.counters.add("engine_seconds_total", seconds)
        self.counters.add("computed_tokens_total", result.num_tokens)
        self._failed_steps = 0
        outputs = self.with_timing(result.outputs, began)
        self._advancing = bool(result.num_tokens or outputs)
        if outputs:
            self.deliver(outputs)
        self.after_step(outputs)
        return seconds

    def _flush(self) -> None:
        self.links.send_outputs(self.outbox)
        self.outbox = []

    def _tell_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.send()

    def _on_failed_step(self) -> None:
        self.counters.add("step_failures_total")
        self._failed_steps += 1
        for request_id in self.computing():
            self.fail(request_id, "internal", "the engine failed; see the worker's log")
        if self.engine.pool.is_cuda or self._failed_steps >= MAX_FAILED_STEPS:
            self._flush()
            raise BrokenEngineError(f"{self._failed_steps} engine steps failed in a row")

    # --- requests ---------------------------------------------------------------------------------

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """Free all that the request holds and tell the router why it ends."""
        self.abort(request_id)
        self.answer_error(request_id, kind, reason)

    def answer_error(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        self.outbox.append(
            TokenOutput(
                request_id=request_id,
                token_ids=[],
                finish_reason="error",
                error_kind=kind,
                error=reason[:4096],
            )
        )

    def abort_all(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._fetcher.abort(request_id)
            self.abort(request_id)

    def _on_router_message(self, message: RouterToWorker, link: RouterLink) -> None:
        match message:
            case Generate():
                self._on_generate(message)
            case Abort():
                self.abort_all(message.request_ids)
            case CallRoll():
                self._on_roll_call(message, link)
            case Peers():
                self._warm_up(message.peers)
            case Redirect():
                self._on_redirect(message)
            case Replan():
                self._on_replan(message)
            case PeerGone():
                self._on_peer_gone(message)
            case ReplayKvEvents():
                self._on_replay(message, link)
            case Prefetch():
                self._on_prefetch(message)
            case PrepareToLeave():
                self.departure.prepare(message)
            case Leave():
                self.departure.let_go(message, link)
            case Registered():
                self._on_registered(message, link)
            case Unregistered():
                self.links.register_again(link)

    def _on_generate(self, message: Generate) -> None:
        request = message.request
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            reason = f"{self.parts.worker_id} was restarted after the request was placed"
            self.answer_error(request.request_id, "worker_lost", reason)
        elif self._has(request.request_id):
            self.counters.add("duplicate_messages_total")
        else:
            self._start_or_fetch(message)

    def _has(self, request_id: str) -> bool:
        return request_id in self._fetcher.fetches or self.knows(request_id)

    def _on_roll_call(self, message: CallRoll, link: RouterLink) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            return
        absent = [request_id for request_id in message.request_ids if not self._has(request_id)]
        if not absent:
            return
        if self.outbox:  # how they ended comes first
            self._flush()
        link.send(
            Absent(worker_id=self.parts.worker_id, incarnation=self.parts.incarnation, request_ids=absent)
        )

    def _on_redirect(self, message: Redirect) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
        else:
            self.redirect(message.request_id, message.decode)

    def _on_replan(self, message: Replan) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
        elif (fetch := self._fetcher.fetches.get(message.request_id)) is not None:
            fetch.replan(message.plan)
        else:
            self.replan(message.request_id, message.plan)

    def _on_peer_gone(self, message: PeerGone) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
        else:
            self.peer_gone(peer_identity(message.worker_id, message.gone).encode())

    def _on_registered(self, message: Registered, link: RouterLink) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
        elif message.router == link.router:
            self.counters.add("duplicate_messages_total")
        else:
            link.confirmed(message.router)

    def _on_replay(self, message: ReplayKvEvents, link: RouterLink) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
        elif self._kv_events is not None:
            self._kv_events.replay(message.first, link)

    def _on_prefetch(self, message: Prefetch) -> None:
        request = message.request

        def answer(request: EngineRequest, complete: bool) -> None:
            message = Prefetched(
                worker_id=self.parts.worker_id,
                incarnation=self.parts.incarnation,
                request_id=request.request_id,
                complete=complete,
            )
            self.links.send(request.request_id, message)

        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            return
        if request.request_id in self._fetcher.fetches:
            self.counters.add("duplicate_messages_total")
            return
        try:
            if not self._fetcher.start(request, message.prefix, answer):
                answer(request, False)
        except InvalidRequestError as error:
            about = {"request_id": request.request_id}
            log.warning("no prefetch of %s: %s", request.request_id, error, extra=about)
            answer(request, False)

    def _start_or_fetch(self, message: Generate) -> None:
        """Start the request, or fetch its prefix from another worker first."""

        def start(request: EngineRequest, complete: bool) -> None:
            self._start(msgspec.structs.replace(message, request=request))

        try:
            if message.prefix is not None and self._fetcher.start(message.request, message.prefix, start):
                return
        except InvalidRequestError as error:
            self.answer_error(message.request.request_id, "invalid", str(error))
            return
        self._start(message)

    def _start(self, message: Generate) -> None:
        try:
            self.start_request(message)
        except InvalidRequestError as error:
            self.answer_error(message.request.request_id, "invalid", str(error))

    def _warm_up(self, peers: Iterable[PeerAddress]) -> None:
        """First contact costs time that no request should wait for."""
        for peer in peers:
            try:
                self.sender.connect(peer)
            except TandemError as error:
                log.warning("no transfer to %s: %s", peer.worker_id, error)
