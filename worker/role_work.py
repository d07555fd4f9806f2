"""The work that a role adds to the loop, and the handling of a router's messages to a worker."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import msgspec

from kvtransfer.interface import ReceiveEvent, SendEvent
from kvtransfer.sender import Sender
from protocol import router_to_worker as messages
from protocol.errors import InvalidRequestError, TandemError
from protocol.ids import PeerAddress, peer_identity
from protocol.outputs import ErrorKind, TokenOutput
from protocol.requests import DraftPlan, EngineRequest
from protocol.router_to_worker import Generate
from protocol.worker_to_router import AbsentRequests, AdapterLoaded, Prefetched
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.adapter_loads import AdapterLoads, Problem
from worker.departure import Departure
from worker.fetch import PrefixFetcher
from worker.kv_events import KvEventSender
from worker.link import RouterLink, RouterLinks
from worker.parts import WorkerParts
from worker.requests import RequestTable

log = logging.getLogger(__name__)


class RoleWork(ABC):
    """The base of all roles' loops, with the handling of routers' messages. Belongs to the loop's thread.
    `requests` holds the requests on this worker, `outbox` the outputs not yet sent to the routers. A role's
    loop sets `requests`, `WorkerLoop` the other parts declared here.
    """

    requests: RequestTable[Any]
    sender: Sender
    departure: Departure
    adapter_loads: AdapterLoads
    _fetcher: PrefixFetcher
    _kv_events: KvEventSender | None

    def __init__(self, parts: WorkerParts, links: RouterLinks) -> None:
        self.parts = parts
        self.config = parts.config
        self.counters = parts.counters
        self.links = links
        self.outbox: list[TokenOutput] = []

    @abstractmethod
    def start_request(self, message: Generate) -> None:
        """Add a new request to the engine. May raise `InvalidRequestError`."""

    def abort(self, request_id: str) -> None:
        """Forget a request in any stage. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request)

    @abstractmethod
    def _end(self, request: Any) -> None:
        """Free everything that a request of this role holds, in any stage."""

    def redirect(self, request_id: str, decode: PeerAddress | None) -> None:
        """Hand a request over to another decode worker, or decode it here if None. For prefill workers."""
        self.counters.add("dropped_messages_total")

    def replan(self, request_id: str, plan: DraftPlan | None) -> None:
        """Draft for the request as `plan` says. For decode workers only."""
        self.counters.add("dropped_messages_total")

    def peer_gone(self, peer: bytes) -> None:
        """Free the requests of a lost worker with the identity `peer`. For draft workers only."""
        self.counters.add("dropped_messages_total")

    def knows(self, request_id: str) -> bool:
        return request_id in self.requests

    def under_way(self) -> list[str]:
        """Return the ids of the requests that hold resources here, in any stage."""
        return [request.request_id for request in self.requests]

    @abstractmethod
    def computing(self) -> list[str]:
        """Return the ids of the requests for which the engine still has to compute something."""

    def on_peer_request(self, identity: bytes, request: PeerRequest) -> None:
        """Handle a request of another worker that only this role can answer."""
        self.counters.add("dropped_messages_total")
        log.warning("dropped a message that is not for a %s worker", self.parts.role.name)

    def on_peer_reply(self, peer: PeerAddress, reply: PeerReply) -> None:
        """Handle another worker's answer to a request of this role."""
        self.counters.add("stale_messages_total")

    @abstractmethod
    def on_transfer(self, event: ReceiveEvent | SendEvent) -> None:
        """Handle an event of one of the role's leases."""

    def peers_in_use(self) -> set[str]:
        """Return the incarnations from which the role awaits something."""
        return set()

    def before_step(self, first_time: list[EngineRequest]) -> None:
        """Prepare for a step in which the engine first schedules these requests."""
        return

    def with_timing(self, outputs: list[TokenOutput], began: float) -> list[TokenOutput]:
        """Return a step's outputs with their requests' timings. The step began at `began`."""
        return outputs

    def deliver(self, outputs: list[TokenOutput]) -> None:
        self.outbox += outputs
        self.flush()

    @abstractmethod
    def after_step(self, outputs: list[TokenOutput]) -> None:
        """Do the role's work after a step whose outputs have been sent to the router."""

    @abstractmethod
    def expire(self, now: float) -> None:
        """Give up everything whose deadline has passed. `now` is `time.monotonic()`."""

    def fail(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        """Free the request's resources and tell the router why it ends."""
        self.abort(request_id)
        self.answer_error(request_id, kind, reason)

    def answer_error(self, request_id: str, kind: ErrorKind, reason: str) -> None:
        output = TokenOutput(
            request_id=request_id, token_ids=[], finish_reason="error", error_kind=kind, error=reason[:4096]
        )
        self.outbox.append(output)

    def flush(self) -> None:
        self.links.send_outputs(self.outbox)
        self.outbox = []

    def take(self, message: messages.RouterToWorker, link: RouterLink) -> None:
        """Handle a message that arrived on `link`."""
        match message:
            case messages.Abort():
                self.abort_all(message.request_ids)
            case messages.Peers():
                self._warm_up(message.peers)
            case messages.Unregistered():
                self.links.register_again(link)
            case messages.Refused():
                pass  # a refusal only answers a registration, which is over
            case messages.Generate():
                self._on_generate(message)
            case _ if message.incarnation != self.parts.incarnation:
                self.counters.add("stale_messages_total")
            case messages.Registered():
                self._on_registered(message, link)
            case messages.CallRoll():
                self._on_roll_call(message, link)
            case messages.Redirect():
                self.redirect(message.request_id, message.decode)
            case messages.Replan():
                self._on_replan(message)
            case messages.PeerGone():
                self.peer_gone(peer_identity(message.worker_id, message.gone).encode())
            case messages.ReplayKvEvents():
                if self._kv_events is not None:
                    self._kv_events.replay(message.first, link)
            case messages.Prefetch():
                self._on_prefetch(message)
            case messages.PrepareToLeave():
                self.departure.prepare(message)
            case messages.Leave():
                self.departure.let_go(link)
            case messages.LoadAdapter():
                self._load_adapter(message, link)
            case messages.UnloadAdapter():
                self.adapter_loads.unload(message.name)

    def abort_all(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and stop their fetches and adapter loads. Ignore unknown ids."""
        for request_id in request_ids:
            self.adapter_loads.abort(request_id)
            self._fetcher.abort(request_id)
            self.abort(request_id)

    def _on_generate(self, message: messages.Generate) -> None:
        request = message.request
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            reason = f"{self.parts.worker_id} was restarted after the request was placed"
            self.answer_error(request.request_id, "worker_lost", reason)
        elif self._has(request.request_id):
            self.counters.add("duplicate_messages_total")
        else:
            self.adapter_loads.require(request, lambda problem: self._start_or_fetch(message, problem))

    def _has(self, request_id: str) -> bool:
        waits = request_id in self.adapter_loads or request_id in self._fetcher.fetches
        return waits or self.knows(request_id)

    def _start_or_fetch(self, message: messages.Generate, problem: Problem | None) -> None:
        """Start the request, or fetch its prefix first. `problem` is its adapter's, None if loaded."""
        if problem is not None:
            self.answer_error(message.request.request_id, *problem)
            return

        def start(request: EngineRequest, complete: bool) -> None:
            self._start(msgspec.structs.replace(message, request=request))

        try:
            if message.prefix is not None and self._fetcher.start(message.request, message.prefix, start):
                return
        except InvalidRequestError as error:
            self.answer_error(message.request.request_id, "invalid", str(error))
            return
        self._start(message)

    def _start(self, message: messages.Generate) -> None:
        try:
            self.start_request(message)
        except InvalidRequestError as error:
            self.answer_error(message.request.request_id, "invalid", str(error))

    def _on_prefetch(self, message: messages.Prefetch) -> None:
        request = message.request
        if request.request_id in self._fetcher.fetches:
            self.counters.add("duplicate_messages_total")
        else:
            self.adapter_loads.require(request, lambda problem: self._prefetch(message, problem))

    def _prefetch(self, message: messages.Prefetch, problem: Problem | None) -> None:
        request, reason = message.request, problem[1] if problem is not None else ""
        try:
            if not reason and self._fetcher.start(request, message.prefix, self._answer_prefetch):
                return
        except InvalidRequestError as error:
            reason = str(error)
        if reason:
            about = {"request_id": request.request_id}
            log.warning("no prefetch of %s: %s", request.request_id, reason, extra=about)
        self._answer_prefetch(request, False)

    def _answer_prefetch(self, request: EngineRequest, complete: bool) -> None:
        request_id = request.request_id
        message = Prefetched(**self.parts.ids, request_id=request_id, complete=complete)
        self.links.send(request.request_id, message)

    def _on_roll_call(self, message: messages.CallRoll, link: RouterLink) -> None:
        absent = [request_id for request_id in message.request_ids if not self._has(request_id)]
        if not absent:
            return
        if self.outbox:  # the ends of the absent requests go first
            self.flush()
        link.send(AbsentRequests(**self.parts.ids, request_ids=absent))

    def _on_replan(self, message: messages.Replan) -> None:
        fetch = self._fetcher.fetches.get(message.request_id)
        if fetch is not None:
            fetch.replan(message.plan)
        else:
            self.replan(message.request_id, message.plan)

    def _on_registered(self, message: messages.Registered, link: RouterLink) -> None:
        if message.router == link.router:
            self.counters.add("duplicate_messages_total")
        else:
            link.confirmed(message.router)

    def _load_adapter(self, message: messages.LoadAdapter, link: RouterLink) -> None:
        def answer(digest: str, problem: Problem | None) -> None:
            kind, error = problem or ("invalid", "")
            about = {**self.parts.ids, "name": message.name, "digest": digest}
            link.send(AdapterLoaded(**about, error=error[:4096], error_kind=kind))

        self.adapter_loads.load(message.name, message.path, message.digest, answer)

    def _warm_up(self, peers: Iterable[PeerAddress]) -> None:
        """Connect to the peers in advance, so that no request waits for the first contact."""
        for peer in peers:
            try:
                self.sender.connect(peer)
            except TandemError as error:
                log.warning("no transfer to %s: %s", peer.worker_id, error)
