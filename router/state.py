"""What the router's parts share: configuration, tokenizer, workers, journal, metrics."""

from __future__ import annotations

import asyncio
import logging
import time

from protocol.config import ServeConfig
from protocol.messages import (
    HandoverFailed,
    Peers,
    Register,
    Registered,
    StepOutput,
    WorkerState,
    WorkerToRouter,
)
from protocol.sockets import ClusterKeys
from router.dispatcher import Dispatcher
from router.errors import ApiError
from router.journal import Journal
from router.metrics import Metrics
from router.placement import placement_policy
from router.registry import ModelFacts, Registry, Worker
from router.tokenizer import Tokenizer
from router.worker_link import WorkerLink

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.5


class RouterState:
    """Everything behind the HTTP API. The workers' endpoint is there at once, traffic from `attach()` on."""

    def __init__(self, config: ServeConfig, keys: ClusterKeys, link_host: str = "127.0.0.1") -> None:
        self.config = config
        self.created = int(time.time())
        self.is_draining = False
        self.metrics = Metrics(config.model_name)
        self.journal = Journal()
        policy = placement_policy(config.placement)
        self.tokenizer = Tokenizer.load(config)
        self.registry = Registry(config.worker_timeout, self._greet, self._lost)
        self.link = WorkerLink(keys, link_host, self.metrics)
        self.dispatcher = Dispatcher(
            config, self.journal, self.registry, policy, self.metrics, self.link.send
        )
        self.metrics.watch_workers(lambda: self.registry)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to listen to the workers."""
        self._loop = loop
        self.link.attach(loop, self._on_message)
        self._sweep()

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._loop = None
        self.link.close()
        self.tokenizer.close()

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Thread-safe: this incarnation of a worker is gone for good."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.registry.mark_dead, worker_id, incarnation, reason)

    def start_draining(self) -> None:
        self.is_draining = True

    def not_ready(self) -> str | None:
        """Why no request can be taken now; None when one can."""
        if self.is_draining:
            return "the server is shutting down"
        if self.registry.model is None:
            return "the server is starting: no worker has registered yet"
        if not any(worker.state.lifecycle == "ready" for worker in self.registry.live()):
            return "no worker is ready"
        return None

    def require_ready(self) -> ModelFacts:
        """The model's facts. Raises `ApiError` 503 while starting or draining."""
        reason = self.not_ready()
        if reason is not None or self.registry.model is None:
            raise ApiError(503, reason or "the server is starting", retry_after_s=1.0)
        return self.registry.model

    def _on_message(self, message: WorkerToRouter) -> None:
        match message:
            case StepOutput():
                self.dispatcher.step(message)
            case HandoverFailed():
                self.dispatcher.handover_failed(message)
            case WorkerState():
                if not self.registry.update(message):
                    self.metrics.dropped("stale_incarnation")
            case Register():
                if self.registry.register(message) is None:
                    self.metrics.dropped("refused_registration")

    def _greet(self, worker: Worker) -> None:
        self.link.send(worker, Registered(incarnation=worker.key.incarnation))
        if worker.role == "prefill":
            decodes = [other.address for other in self.registry.live() if other.role == "decode"]
            self.link.send(worker, Peers(peers=decodes))
        else:
            self._introduce(worker)

    def _introduce(self, decode: Worker) -> None:
        """Let the prefill workers connect to it before the first request does."""
        for worker in self.registry.live():
            if worker.role == "prefill":
                self.link.send(worker, Peers(peers=[decode.address]))

    def _lost(self, worker: Worker, reason: str) -> None:
        self.dispatcher.worker_lost(worker, reason)

    def _sweep(self) -> None:
        if self._loop is not None:
            self.registry.sweep()
            self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
