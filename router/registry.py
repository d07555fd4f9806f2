"""The workers that the router knows, each under its current incarnation."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from protocol.messages import Register, Role, WorkerState
from router.placement.interface import WorkerSnapshot

logger = logging.getLogger(__name__)

MAX_RETIRED = 10_000


class WorkerKey(NamedTuple):
    worker_id: str
    incarnation: str


class ModelFacts(NamedTuple):
    """What all workers must agree on."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Worker:
    """One incarnation of a worker. `live` is false after it died or fell silent."""

    def __init__(self, register: Register, now: float) -> None:
        self.key = WorkerKey(register.address.worker_id, register.address.incarnation)
        self.identity = register.address.worker_id.encode()
        self.address = register.address
        self.role = register.role
        self.start_up = register.start_up
        self.state = register.state
        self.registered = now
        self.last_seen = now
        self.live = True
        self.outstanding_requests = 0
        self.outstanding_prefill_tokens = 0

    def snapshot(self) -> WorkerSnapshot:
        state = self.state
        return WorkerSnapshot(
            worker_id=self.key.worker_id,
            role=self.role,
            lifecycle=state.lifecycle,
            outstanding_requests=self.outstanding_requests,
            outstanding_prefill_tokens=self.outstanding_prefill_tokens,
            reported_requests=state.num_running + state.num_waiting,
            reported_prefill_tokens=state.waiting_tokens,
            total_blocks=state.total_blocks,
            free_blocks=state.free_blocks + state.cached_blocks,
        )


class Registry:
    """Knows which incarnation of each worker is current.

    `on_registered(worker)` is called before anything else may be sent to it, `on_lost(worker, reason)` when
    it is gone. A silent worker that speaks again under the same incarnation is taken back; one reported dead
    never is.
    """

    def __init__(
        self,
        worker_timeout: float,
        on_registered: Callable[[Worker], None],
        on_lost: Callable[[Worker, str], None],
    ) -> None:
        self._timeout = worker_timeout
        self._on_registered = on_registered
        self._on_lost = on_lost
        self._workers: dict[str, Worker] = {}
        self._retired: set[WorkerKey] = set()
        self._retired_order: deque[WorkerKey] = deque()
        self.model: ModelFacts | None = None
        self.known_roles: set[Role] = set()
        """Of every worker that has ever registered."""

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def live(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.live]

    def named(self, worker_id: str) -> Worker:
        """The worker's current incarnation; KeyError where there is none."""
        return self._workers[worker_id]

    def current(self, worker_id: str, incarnation: str) -> Worker | None:
        """The worker, if this is its current incarnation."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.key.incarnation == incarnation else None

    def register(self, register: Register) -> Worker | None:
        """Make this incarnation the current one; None when it is stale or serves another model."""
        key = WorkerKey(register.address.worker_id, register.address.incarnation)
        if key in self._retired:
            return None
        facts = ModelFacts(
            register.max_model_len,
            register.vocab_size,
            tuple(register.eos_token_ids),
        )
        if self.model is not None and facts != self.model:
            logger.error("worker %s serves %s, the cluster %s: refused", key.worker_id, facts, self.model)
            return None
        self.model = facts
        known = self._workers.get(key.worker_id)
        if known is not None and known.key == key:
            self.heard(known)
            self._on_registered(known)
            return known
        worker = self._workers[key.worker_id] = Worker(register, time.monotonic())
        self.known_roles.add(worker.role)
        logger.info("worker %s (%s, incarnation %s) registered", key.worker_id, worker.role, key.incarnation)
        self._on_registered(worker)
        if known is not None:
            self._retire(known, "it was started anew")
        return worker

    def update(self, state: WorkerState) -> bool:
        """Take a heartbeat; False when it is not from a current incarnation."""
        worker = self.current(state.worker_id, state.incarnation)
        if worker is None:
            return False
        if state.lifecycle != "starting":  # else it was sent before the registration, which overtook it
            worker.state = state
        self.heard(worker)
        return True

    def heard(self, worker: Worker) -> None:
        worker.last_seen = time.monotonic()
        if not worker.live:
            logger.warning("worker %s speaks again", worker.key.worker_id)
            worker.live = True

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        """The launcher knows that this incarnation is gone for good."""
        worker = self.current(worker_id, incarnation)
        if worker is None:
            self._remember_retired(WorkerKey(worker_id, incarnation))
            return
        self._retire(worker, reason)
        del self._workers[worker_id]

    def sweep(self) -> None:
        """Declare the silent ones lost."""
        deadline = time.monotonic() - self._timeout
        for worker in list(self._workers.values()):
            if worker.live and worker.last_seen < deadline:
                self._lose(worker, f"nothing was heard of it for {self._timeout:g} s")

    def _retire(self, worker: Worker, reason: str) -> None:
        self._remember_retired(worker.key)
        if worker.live:
            self._lose(worker, reason)

    def _remember_retired(self, key: WorkerKey) -> None:
        if key not in self._retired:
            self._retired.add(key)
            self._retired_order.append(key)
        if len(self._retired_order) > MAX_RETIRED:
            self._retired.discard(self._retired_order.popleft())

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.live = False
        logger.error("worker %s (incarnation %s) is lost: %s", *worker.key, reason)
        self._on_lost(worker, reason)
