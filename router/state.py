"""The state that the router's parts share: configuration, tokenizer, workers, journal, metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from messaging.sockets import ClusterKeys
from protocol import worker_to_router as messages
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ids import new_incarnation
from protocol.ports import ANY_PORT
from protocol.router_to_worker import Peers, Refused, Registered, Unregistered
from protocol.version import protocol_problem
from router.adapters import AdapterTable
from router.api_keys import ApiKeys
from router.decoding import PendingBodies
from router.dispatch import Core
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.drainer import Drainer
from router.dispatch.kv_feed import KvFeed
from router.dispatch.placer import Placer
from router.dispatch.races import RollCall
from router.dispatch.worker_link import WorkerLink
from router.errors import unavailable
from router.middleware import BrowserGuard
from router.observe.metrics import Metrics, ServerTotals
from router.placement import placement_policy
from router.preprocessing.client import GrammarCompiler, Preprocessor
from router.preprocessing.requests import RequestPreparer
from router.reading.chats import Chats
from router.reading.prepared import ServedModel, load_defaults
from router.requests.journal import Journal
from router.requests.slices import Slices
from router.responses.store import ResponseStore, response_store
from router.scaling.interface import ChangeTurns
from router.scaling.scaler import Autoscaler, Restarter, Scaler
from router.text.tokenizer import Tokenizer
from router.workers.registry import WATCH_INTERVAL_S, ModelFacts, Registry, Worker, WorkerKey

if TYPE_CHECKING:
    from router.observe.tracing import Tracing

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
_SCHEDSTAT = "/proc/thread-self/schedstat"


class RouterState:
    """All parts of the router except the HTTP API. `attach()` begins to read workers' messages."""

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        link_host: str = "127.0.0.1",
        link_ports: Sequence[int] = ANY_PORT,
        router_id: str = "router-0",
    ) -> None:
        self.config = config
        self.router_id, self.incarnation = router_id, new_incarnation()
        self.created = int(time.time())
        self.is_draining = False
        policy = placement_policy(config.placement, config.prefill_placement, config.decode_placement)
        self.bodies = PendingBodies(config.max_body_bytes)
        self.guard = BrowserGuard(config.host, config.origins)
        self.slices = Slices()
        self.journal = Journal(self.incarnation)
        self.tokenizer = Tokenizer.load(config)
        self.chats = Chats(config, self.tokenizer)
        self.defaults = load_defaults(config)
        is_shared = config.router_replicas > 1
        self.registry = Registry(config.worker_timeout, config.block_size, is_shared, config.max_num_seqs)
        self.metrics = Metrics(config.model_name, self.registry, config.metric_names == "vllm")
        failed = partial(self.metrics.count, "preprocessing_failures_total")
        self.preprocessor = Preprocessor(config, self.tokenizer, failed)
        self.grammars = GrammarCompiler(self.preprocessor)
        self.keys = ApiKeys(config, self.metrics)
        self.tracing = _tracing(config, self.metrics)
        dropped = partial(self.metrics.count, "stored_responses_dropped_total")
        self.responses: ResponseStore | None = response_store(config, dropped)
        self.link = WorkerLink(keys, link_host, self.metrics, link_ports)
        core = Core(config, self.journal, self.registry, self.metrics, self.link.send)
        self.kv_feed = KvFeed(core)
        self.metrics.follow("kv_index_blocks", lambda: len(self.kv_feed.index))
        self.metrics.follow("ready", lambda: self.not_ready() is None)
        self.metrics.follow("num_workers_awaited", lambda: len(self.registry.awaited()))
        self.metrics.follow("num_requests_parked", lambda: self.placer.num_parked)
        self.placer = Placer(core, policy, self.kv_feed)
        self.dispatcher = Dispatcher(core, self.placer)
        self.drainer = Drainer(core, self.placer, self.dispatcher)
        self.turns = ChangeTurns(router_id)
        self.adapters = AdapterTable(core, self.turns)
        if config.metric_names == "vllm":
            parked, named = (lambda: self.placer.num_parked), (lambda: self.adapters.named)
            self.metrics.registry.register(ServerTotals(config, self.registry, parked, named))
        parts = (config, self.tokenizer, self.chats, self.preprocessor)
        self.requests = RequestPreparer(*parts, self.adapters.find, lambda: self.kv_feed.formats)
        self.scaler = Scaler(core, self.drainer, self.turns)
        self.restarter = Restarter(core, self.drainer, self.scaler, self.turns)
        self.autoscaler = Autoscaler(core, self.scaler, self.drainer, self.placer.meter)
        self.roll_call = RollCall(core, self.placer.loads, self.dispatcher.lost)
        self.registry.on_registered = self._on_registered
        self.registry.on_lost = self._on_lost
        self.registry.on_refused = self._refuse
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._sweep_due = 0.0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._sweep_due = loop, time.monotonic()
        self.link.attach(loop, self._on_message)
        self._sweep()
        self._watch_workers()

    def close(self) -> None:
        for timer in (self._sweeper, self._watch):
            if timer is not None:
                timer.cancel()
        self._loop = None
        self.link.close()
        if self.tracing is not None:
            self.tracing.close()
        self.preprocessor.close()
        self.requests.close()
        if self.responses is not None:
            self.responses.close()

    def not_ready(self) -> str | None:
        """Return why no request can be accepted now, or None if one can."""
        if self.is_draining:
            return "the server is shutting down"
        if self.registry.model is None:
            return "the server is starting: no worker has registered yet"
        if not any("decode" in worker.role.tasks for worker in self.registry.live()):
            awaited = ", ".join(self.registry.awaited())
            waiting = f"; {self.placer.num_parked} requests wait for {awaited} to start" if awaited else ""
            return f"no worker is ready{waiting}"
        return None

    def require_ready(self) -> ModelFacts:
        """Return the model's facts. Raises `ApiError` 503 if a request could not even wait for a worker."""
        reason = self.not_ready()
        model = self.registry.model
        if model is None or self.is_draining or (reason is not None and not self.registry.awaited()):
            raise unavailable(reason or "the server is starting")
        return model

    def require_served(self) -> ServedModel:
        """Return the limits and names for reading a request. Raises like `require_ready`."""
        facts = self.require_ready()
        return ServedModel(facts.max_model_len, facts.vocab_size, self.adapters.names, self.defaults)

    def _on_message(self, message: messages.WorkerToRouter | messages.RegisterHeader) -> None:
        match message:
            case messages.StepOutput():
                self.dispatcher.step(message)
            case messages.HandoverFailed():
                self.dispatcher.handover_failed(message)
            case messages.AbsentRequests():
                self.roll_call.absent(message)
            case messages.Prefetched():
                self.drainer.prefetched(message)
            case messages.AdapterLoaded():
                self.adapters.answered(message)
            case messages.Leaving():
                self.drainer.leaving(message)
            case messages.WorkerState():
                if not self.registry.update(message):
                    self._on_unknown(message)
                self.kv_feed.check(message, time.monotonic())
            case messages.KvEvents():
                self.kv_feed.receive(message)
            case messages.RegisterHeader():  # its remaining fields are unknown here
                problem = protocol_problem(message.protocol, message.release, "the router", "the worker")
                key = WorkerKey(message.address.worker_id, message.address.incarnation)
                self.registry.refuse(key, problem)
            case messages.Register():
                self.registry.register(message)

    def _on_unknown(self, state: messages.WorkerState) -> None:
        """Ask a worker that started before this router to register."""
        if self.registry.is_retired(state.worker_id, state.incarnation):
            self.metrics.count("messages_dropped_total", "stale_incarnation")
        else:
            self.link.send_to(state.worker_id, Unregistered(incarnation=state.incarnation))

    def _on_registered(self, worker: Worker) -> None:
        """Confirm a registration, and let workers connect before the first request needs the connections."""
        self.kv_feed.register(worker)
        self.link.send(worker, Registered(incarnation=worker.key.incarnation, router=self.incarnation))
        self.adapters.synchronize(worker)
        live = self.registry.live()
        receivers = [other.address for other in live if other.role.name in worker.role.pushes_to]
        if receivers:
            self.link.send(worker, Peers(peers=receivers))
        for other in live:
            if worker.role.name in other.role.pushes_to:
                self.link.send(other, Peers(peers=[worker.address]))
        self.dispatcher.resume_parked()

    def _refuse(self, key: WorkerKey, reason: str) -> None:
        self.metrics.count("messages_dropped_total", "refused_registration")
        self.link.send_to(key.worker_id, Refused(incarnation=key.incarnation, reason=reason))

    def _on_lost(self, worker: Worker, reason: str) -> None:
        is_silent = worker.silence_s > self.config.worker_timeout
        reason_kind = "silent" if is_silent else "ended"
        self.metrics.count("workers_lost_total", "stalled" if worker.is_stalled else reason_kind)
        self.dispatcher.worker_lost(worker, reason)
        self.placer.drafts.lost(worker)
        self.drainer.lost(worker)
        self.adapters.lost(worker)

    def _watch_workers(self) -> None:
        if self._loop is not None:
            now = time.monotonic()
            self.registry.sweep(now)
            self.dispatcher.races.sweep(now)
            self._watch = self._loop.call_later(WATCH_INTERVAL_S, self._watch_workers)

    def _sweep(self) -> None:
        if self._loop is not None:
            now = time.monotonic()
            self.metrics.observe_loop(now - self._sweep_due, time.thread_time(), _core_wait_s())
            self._sweep_due = now + SWEEP_INTERVAL_S
            self.kv_feed.sweep()
            self.keys.reload()
            self.roll_call.sweep(time.monotonic())
            self.placer.ahead.check_all()
            self.dispatcher.resume_parked()
            self.dispatcher.send_waiting()
            self.drainer.sweep()
            self.placer.drafts.sweep()
            if self.config.router_replicas == 1 and "restart" not in self.turns.changes.under_way:
                self.autoscaler.step({})
            self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)


def _tracing(config: ServeConfig, metrics: Metrics) -> Tracing | None:
    """Return the tracing; None without the option, so that OpenTelemetry is imported only if needed."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from router.observe.tracing import Tracing
    except ImportError as error:
        needed = "needs OpenTelemetry: pip install 'tandem-serve[otel]'"
        raise ConfigError(f"--otlp-traces-endpoint: {needed} ({error})") from error
    dropped = partial(metrics.count, "trace_spans_dropped_total")
    return Tracing(config.otlp_traces_endpoint, config.model_name, dropped)


def _core_wait_s() -> float:
    """Return the seconds that this thread has waited for a core, as counted by Linux; elsewhere 0."""
    try:
        file = os.open(_SCHEDSTAT, os.O_RDONLY)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 256).split()[1]) / 1e9
    finally:
        os.close(file)
