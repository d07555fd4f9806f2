"""The handling of a router's messages to a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from kvtransfer.sender import Sender
from protocol import router_to_worker as messages
from protocol.errors import InvalidRequestError, TandemError
from protocol.ids import PeerAddress, peer_identity
from protocol.requests import EngineRequest
from protocol.worker_to_router import AbsentRequests, AdapterLoaded, Prefetched
from worker.adapter_loads import AdapterLoads, Problem
from worker.departure import Departure
from worker.fetch import PrefixFetcher
from worker.kv_events import KvEventSender
from worker.link import RouterLink
from worker.role_work import RoleWork

log = logging.getLogger(__name__)


class RouterMessages:
    """The dispatch of each message to the part of the worker that handles it. For the loop's thread."""

    def __init__(
        self,
        role: RoleWork,
        sender: Sender,
        fetcher: PrefixFetcher,
        kv_events: KvEventSender | None,
        departure: Departure,
        adapter_loads: AdapterLoads,
    ) -> None:
        self._role = role
        self._sender = sender
        self._fetcher = fetcher
        self._kv_events = kv_events
        self._departure = departure
        self._parts = role.parts
        self._counters = role.counters
        self._links = role.links
        self._adapter_loads = adapter_loads

    def take(self, message: messages.RouterToWorker, link: RouterLink) -> None:
        """Handle a message that arrived on `link`."""
        match message:
            case messages.Abort():
                self.abort_all(message.request_ids)
            case messages.Peers():
                self._warm_up(message.peers)
            case messages.Unregistered():
                self._links.register_again(link)
            case messages.Refused():
                pass  # a refusal only answers a registration, which is over
            case messages.Generate():
                self._on_generate(message)
            case _ if message.incarnation != self._parts.incarnation:
                self._counters.add("stale_messages_total")
            case messages.Registered():
                self._on_registered(message, link)
            case messages.CallRoll():
                self._on_roll_call(message, link)
            case messages.Redirect():
                self._role.redirect(message.request_id, message.decode)
            case messages.Replan():
                self._on_replan(message)
            case messages.PeerGone():
                self._role.peer_gone(peer_identity(message.worker_id, message.gone).encode())
            case messages.ReplayKvEvents():
                if self._kv_events is not None:
                    self._kv_events.replay(message.first, link)
            case messages.Prefetch():
                self._on_prefetch(message)
            case messages.PrepareToLeave():
                self._departure.prepare(message)
            case messages.Leave():
                self._departure.let_go(link)
            case messages.LoadAdapter():
                self._load_adapter(message, link)
            case messages.UnloadAdapter():
                self._adapter_loads.unload(message.name)

    def abort_all(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and stop their fetches and adapter loads. Ignore unknown ids."""
        for request_id in request_ids:
            self._adapter_loads.abort(request_id)
            self._fetcher.abort(request_id)
            self._role.abort(request_id)

    def _on_generate(self, message: messages.Generate) -> None:
        request = message.request
        if message.incarnation != self._parts.incarnation:
            self._counters.add("stale_messages_total")
            reason = f"{self._parts.worker_id} was restarted after the request was placed"
            self._role.answer_error(request.request_id, "worker_lost", reason)
        elif self._has(request.request_id):
            self._counters.add("duplicate_messages_total")
        else:
            self._adapter_loads.require(request, lambda problem: self._start_or_fetch(message, problem))

    def _has(self, request_id: str) -> bool:
        waits = request_id in self._adapter_loads or request_id in self._fetcher.fetches
        return waits or self._role.knows(request_id)

    def _start_or_fetch(self, message: messages.Generate, problem: Problem | None) -> None:
        """Start the request, or fetch its prefix first. `problem` is its adapter's, None if loaded."""
        if problem is not None:
            self._role.answer_error(message.request.request_id, *problem)
            return

        def start(request: EngineRequest, complete: bool) -> None:
            self._start(msgspec.structs.replace(message, request=request))

        try:
            if message.prefix is not None and self._fetcher.start(message.request, message.prefix, start):
                return
        except InvalidRequestError as error:
            self._role.answer_error(message.request.request_id, "invalid", str(error))
            return
        self._start(message)

    def _start(self, message: messages.Generate) -> None:
        try:
            self._role.start_request(message)
        except InvalidRequestError as error:
            self._role.answer_error(message.request.request_id, "invalid", str(error))

    def _on_prefetch(self, message: messages.Prefetch) -> None:
        request = message.request
        if request.request_id in self._fetcher.fetches:
            self._counters.add("duplicate_messages_total")
        else:
            self._adapter_loads.require(request, lambda problem: self._prefetch(message, problem))

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
        message = Prefetched(
            worker_id=self._parts.worker_id,
            incarnation=self._parts.incarnation,
            request_id=request.request_id,
            complete=complete,
        )
        self._links.send(request.request_id, message)

    def _on_roll_call(self, message: messages.CallRoll, link: RouterLink) -> None:
        absent = [request_id for request_id in message.request_ids if not self._has(request_id)]
        if not absent:
            return
        if self._role.outbox:  # the ends of the absent requests go first
            self._role.flush()
        link.send(
            AbsentRequests(
                worker_id=self._parts.worker_id, incarnation=self._parts.incarnation, request_ids=absent
            )
        )

    def _on_replan(self, message: messages.Replan) -> None:
        fetch = self._fetcher.fetches.get(message.request_id)
        if fetch is not None:
            fetch.replan(message.plan)
        else:
            self._role.replan(message.request_id, message.plan)

    def _on_registered(self, message: messages.Registered, link: RouterLink) -> None:
        if message.router == link.router:
            self._counters.add("duplicate_messages_total")
        else:
            link.confirmed(message.router)

    def _load_adapter(self, message: messages.LoadAdapter, link: RouterLink) -> None:
        def answer(digest: str, problem: Problem | None) -> None:
            kind, error = problem or ("invalid", "")
            link.send(
                AdapterLoaded(
                    worker_id=self._parts.worker_id,
                    incarnation=self._parts.incarnation,
                    name=message.name,
                    digest=digest,
                    error=error[:4096],
                    error_kind=kind,
                )
            )

        self._adapter_loads.load(message.name, message.path, message.digest, answer)

    def _warm_up(self, peers: Iterable[PeerAddress]) -> None:
        """Connect to the peers in advance, so that no request waits for the first contact."""
        for peer in peers:
            try:
                self._sender.connect(peer)
            except TandemError as error:
                log.warning("no transfer to %s: %s", peer.worker_id, error)
