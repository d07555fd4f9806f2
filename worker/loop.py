"""The engine loop: one thread that polls sockets, steps the engine and sends the step's outputs.

It blocks while nothing is to be done, and adds little to a step: one poll, one message to each router, and
the role's transfers.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from engine.engine import Engine
from engine.parallel.group import LostRankError
from protocol.errors import TandemError
from protocol.ids import PeerAddress
from protocol.worker_to_worker import Fetch, FetchGranted, FetchRefused
from worker.adapter_loads import AdapterLoads
from worker.departure import Departure
from worker.fetch import PrefixFetcher, PrefixHolder, fetch_refused
from worker.kv_events import KvEventSender
from worker.link import PeerLinks, PeerSocket, RouterLeases, RouterLinks
from worker.parts import WorkerParts, open_transfers
from worker.role_work import RoleWork

log = logging.getLogger(__name__)

HOUSEKEEPING_INTERVAL_S = 0.25
MAX_FAILED_STEPS = 3
"""Number of consecutive failed steps after which a fresh process replaces the worker."""


class BrokenEngineError(TandemError):
    """The engine fails in every step, or its device is in an unknown state."""


class WorkerLoop(RoleWork):
    """The loop of all roles. Everything except `stop` runs in the thread that called `run`.

    Other workers reach this one at `address`: `inbox` receives their requests, `receiver` their blocks.
    `peers` sends this worker's requests to others, `sender` its blocks.
    """

    def __init__(self, parts: WorkerParts, engine: Engine, links: RouterLinks) -> None:
        super().__init__(parts, links)
        self.engine = engine
        self._router_leases = RouterLeases(links, parts.config.worker_timeout)
        self.poller = zmq.Poller()
        for socket in links.sockets:
            self.poller.register(socket, zmq.POLLIN)
        self.poller.register(parts.wake.fileno(), zmq.POLLIN)
        self.inbox = PeerSocket(parts)
        self.poller.register(self.inbox.socket, zmq.POLLIN)
        self.peers = PeerLinks(parts, self.poller)
        self.sender, self.receiver = open_transfers(parts)
        self.address = PeerAddress(**parts.ids, control=self.inbox.endpoint, offers=self.receiver.offers)
        self._fetcher = PrefixFetcher(self.address, engine, self.receiver, self.peers, self.counters)
        self._holder = PrefixHolder(engine, self.sender, self.counters)
        self._kv_events = None
        if parts.reports_cache:
            self._kv_events = KvEventSender(parts, engine.blocks, links, parts.kv_publisher)
        self._stop = threading.Event()
        self.departure = Departure(parts, links, self.stop)
        self.adapter_loads = AdapterLoads(engine.adapters, self.counters, parts.wake.set)
        if engine.adapters is not None:
            engine.adapters.is_awaited = self._awaits_adapter
        self._advancing = True
        """Whether the last step ran something. If not, the loop's poll waits for a message."""
        self._failed_steps = 0
        self._next_housekeeping = 0.0

    def stop(self) -> None:
        """End the loop after its current step. Any thread may call it."""
        self._stop.set()
        self.parts.wake.set()

    def run(self) -> None:
        """Serve until `stop`. Raises `BrokenEngineError` and `LostRankError`: a fresh process is needed."""
        progress = self.parts.progress
        progress.begin()
        try:
            self._send_kv_events()
            while not self._stop.is_set():
                progress.turns += 1
                self._turn()
            if self.departure.next_role is not None:
                # The remaining requests belong to routers that are gone.
                self.abort_all(self.under_way())
        finally:
            progress.end()
            self.close()

    def close(self) -> None:
        """Close all transfers and the sockets to other workers."""
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
            self._do_upkeep(now)
        if self.outbox:
            self.flush()
        self._send_kv_events()
        self.counters.add("loop_seconds_total", time.perf_counter() - started - stepped)

    def handle(self, events: dict[object, int]) -> None:
        """Handle all messages that have arrived. `events` is the result of the poll."""
        for link in self.links:
            if link.socket in events:
                for message in list(link.receive()):
                    self.take(message, link)
        if self.parts.wake.fileno() in events:
            self.parts.wake.clear()
            self._handle_transfers()
            self.adapter_loads.poll(time.monotonic())
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
                case FetchGranted():
                    self._fetcher.on_lent(reply)
                case FetchRefused():
                    self._fetcher.on_refused(reply.request_id, reply.lease_id, reply.reason)
                case _:
                    self.on_peer_reply(peer, reply)

    def take_peer_requests(self) -> None:
        """Handle all requests from other workers that have arrived."""
        for identity, request in self.inbox.receive():
            if isinstance(request, Fetch):
                self._on_fetch(identity, request)
            else:
                self.on_peer_request(identity, request)

    def _on_fetch(self, identity: bytes, message: Fetch) -> None:
        if message.incarnation != self.parts.incarnation:
            self.counters.add("stale_messages_total")
            self.inbox.reply(identity, fetch_refused(message, "it was restarted"))
        elif (answer := self._holder.lend(message)) is not None:
            self.inbox.reply(identity, answer)

    def _do_upkeep(self, now: float) -> None:
        self.departure.advance(now)
        self._end_orphans(now)
        self.adapter_loads.poll(now)
        if self.engine.adapters is not None:
            self.engine.adapters.drop_unused()
        self._fetcher.expire(now)
        self.expire(now)
        self.peers.close_idle(now, self.peers_in_use() | self._fetcher.holders())
        if self.engine.tiers is not None and not self.engine.has_work():
            self.engine.tiers.poll()

    def _awaits_adapter(self, digest: str) -> bool:
        """Return whether a request on this worker, in any stage, needs the adapter."""
        held = (each.request.adapter for each in (*self.requests, *self._fetcher.fetches))
        digests = {adapter.digest for adapter in held if adapter is not None}
        return digest in digests or self.adapter_loads.awaits(digest)

    def _end_orphans(self, now: float) -> None:
        """End the requests whose router is gone. If the router returns, it gets the error."""
        if len(self.links) == 1:
            return
        fetching = [fetch.request_id for fetch in self._fetcher.fetches]
        held = {*self.under_way(), *fetching, *self.adapter_loads.request_ids()}
        orphans = self._router_leases.expired(held, now)
        if not orphans:
            return
        limit = self.config.worker_timeout
        log.warning("%d requests are ended: their router has been gone for %g s", len(orphans), limit)
        self.counters.add("orphaned_requests_total", len(orphans))
        for request_id in orphans:
            self.adapter_loads.abort(request_id)
            self._fetcher.abort(request_id)
            self.fail(request_id, "worker_lost", f"its router was not connected for {limit:g} s")

    def _step(self) -> float:
        """Run one engine step and return the seconds that the engine took."""
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

    def _send_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.send()

    def _on_failed_step(self) -> None:
        self.counters.add("step_failures_total")
        self._failed_steps += 1
        for request_id in self.computing():
            self.fail(request_id, "internal", "the engine failed; see the worker's log")
        if self.engine.pool.is_cuda or self._failed_steps >= MAX_FAILED_STEPS:
            self.flush()
            raise BrokenEngineError(f"{self._failed_steps} engine steps failed in a row")
