"""The workers that the router knows, each with its current incarnation."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from protocol.roles import ROLES, RoleSpec, Task
from protocol.version import protocol_problem
from protocol.worker_to_router import HEARTBEAT_INTERVAL_S, Register, WorkerState
from router.placement.cluster import Cluster
from router.placement.interface import LinkSpeed, WorkerSnapshot
from router.placement.predict import chunk_tokens, compute_s

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.05
LONGEST_PAUSE_S = 0.5
"""Longest part of a pause of the router that counts as silence of its workers."""
MAX_RETIRED = 10_000
LEAST_SILENCE_S = 0.1
"""Shortest silence that is judged."""
LEAST_LATENESS_S, MOST_LATENESS_S = 0.09, 0.5
"""Bounds of lateness: any machine delays messages by the first now and then; freezes count as the second."""
ALONE_S = 0.5
"""Least silence after which the last worker of a purpose is suspect: others can do its work, at a price."""
LATENESS_HALF_LIFE_S = 30.0
PATIENCE = 1.5
"""Multiple of a worker's recent lateness by which its next message may be late."""


class WorkerKey(NamedTuple):
    worker_id: str
    incarnation: str


class ModelFacts(NamedTuple):
    """The facts on which all workers must agree."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weights: str = ""


class Worker:
    """One incarnation of a worker. `live` is false after it died or fell silent.

    `since`: time of its registration. `silence_s`: seconds without a sign of life while the router was
    running; a heartbeat that reports a stuck loop is no sign of life. `is_suspect`: its next message is much
    later than its work explains, so it gets no new requests, and its current ones race
    (`router/dispatch/races.py`). `is_reachable`: false from a failed send until the worker's next message.
    """

    def __init__(
        self, register: Register, role: RoleSpec, block_size: int, shared: bool, max_rows: int
    ) -> None:
        self.key = WorkerKey(register.address.worker_id, register.address.incarnation)
        self.address = register.address
        self.role = role
        self.host, self.pid = register.host, register.pid
        self.start_up = register.start_up
        self.cache = register.cache
        self.adapters = register.adapters
        """Adapters that the worker reported when it registered."""
        self.state = register.state
        self.since = time.monotonic()
        self.silence_s = 0.0
        self.is_suspect = False
        self._seen_silence_s = self._seen_lateness_s = 0.0
        self._lateness_s, self._late_at = 0.0, self.since
        self.is_reachable = True
        self.live = True
        self.draining = False
        """Whether the worker is about to leave and gets no more requests."""
        self.outstanding_requests = 0
        self.outstanding_prompts = 0
        """Requests whose first token is due from here, with `outstanding_prefill_tokens` to compute."""
        self.outstanding_prefill_tokens = 0
        self.outstanding_rows = 0
        """Requests that decode here now or will, with `outstanding_context` tokens."""
        self.outstanding_context = 0
        self.outstanding_computed = 0
        """Live requests whose prompts are or were computed here, `outstanding_computed_tokens` tokens without
        cached ones. They count wherever they decode.
        """
        self.outstanding_computed_tokens = 0
        self.num_decoding = 0
        """Requests that get tokens in each step."""
        self._block_size = block_size
        self._shared = shared
        self.load = WorkerSnapshot(self.key.worker_id, role.tasks, max_rows=max_rows)
        self.update(register.state)

    @property
    def is_stalled(self) -> bool:
        """Whether the worker's latest heartbeat says that its loop is stuck."""
        return self.state.stalled_s > 0

    @property
    def takes_requests(self) -> bool:
        """Whether the worker may get requests or, if it is a draft worker, drafts to make."""
        return self.live and self.is_reachable and not self.draining

    def is_late(self, now: float) -> bool:
        """Return whether the silence is longer than the worker's load and its recent lateness explain.

        Call often while the worker is silent for over `LEAST_SILENCE_S`: ended silences set its lateness.
        """
        known_s = self._lateness_s * 0.5 ** (max(now - self._late_at, 0.0) / LATENESS_HALF_LIFE_S)
        if self.silence_s < self._seen_silence_s and self._seen_lateness_s > known_s:
            known_s = self._lateness_s = min(self._seen_lateness_s, MOST_LATENESS_S)
            self._late_at = now
        self._seen_silence_s, self._seen_lateness_s = self.silence_s, self.silence_s - self._due_s()
        return self._seen_lateness_s > PATIENCE * max(known_s, LEAST_LATENESS_S)

    def _due_s(self) -> float:
        """Return the longest time to its next message: after a step, or the next heartbeat."""
        load = self.load
        if not self.num_decoding:
            return HEARTBEAT_INTERVAL_S
        if load.prompts > 0:
            return min(compute_s(load, chunk_tokens(load, 0), load.prefill_tokens), HEARTBEAT_INTERVAL_S)
        return min(load.costs_now.decode_s(load.rows, load.context_tokens), HEARTBEAT_INTERVAL_S)

    def update(self, state: WorkerState) -> None:
        """Store a heartbeat. The load in excess of this router's requests belongs to other routers."""
        self.state = state
        self._others = (
            max(state.num_running + state.num_waiting - self.outstanding_requests, 0),
            max(state.num_waiting - self.outstanding_prompts, 0),
            max(state.waiting_tokens - self.outstanding_prefill_tokens, 0),
        )
        self._rows_of_others = self._context_of_others = 0.0
        if self._shared:
            kv_tokens = state.kv_usage * state.costs.room_tokens(state.total_blocks, self._block_size)
            self._rows_of_others = max(state.num_running - self.outstanding_rows, 0)
            self._context_of_others = max(kv_tokens - self.outstanding_context, 0.0)
        load = self.load
        load.costs, load.kv_usage = state.costs, state.kv_usage
        load.kv_tokens = state.costs.room_tokens(state.total_blocks, self._block_size)
        used = [pair for pair in state.pairs if pair.in_use]
        load.links = {pair.peer: LinkSpeed(pair.latency_s, pair.bytes_per_s) for pair in used}
        self.update_load()

    def update_load(self) -> None:
        """Update the load: own outstanding requests, and those of other routers at the last heartbeat."""
        load, (requests, prompts, tokens) = self.load, self._others
        load.requests = self.outstanding_requests + requests
        load.prompts = self.outstanding_prompts + prompts
        load.prefill_tokens = self.outstanding_prefill_tokens + tokens
        load.rows = self.outstanding_rows + self._rows_of_others
        load.context_tokens = self.outstanding_context + self._context_of_others
        load.computed_prompts = self.outstanding_computed
        load.computed_tokens = self.outstanding_computed_tokens


class Registry:
    """The current incarnation of each worker.

    Calls `on_registered(worker)` before anything else may be sent to the worker, `on_refused(key, reason)` if
    it can never join, and `on_lost(worker, reason)` when it is gone. A silent worker that sends again under
    the same incarnation is accepted again; a worker reported dead never is.
    """

    def __init__(
        self, worker_timeout: float, block_size: int = 16, shared: bool = False, max_rows: int = 0
    ) -> None:
        """Initialize. `shared`: other routers use the workers too. `max_rows`: most rows of a batch."""
        self._timeout = worker_timeout
        self._block_size = block_size
        self._shared = shared
        self._max_rows = max_rows
        self.cluster = Cluster()
        """The workers that may get requests or drafts, as placement policies see them."""
        self.on_registered: Callable[[Worker], None] = lambda worker: None
        self.on_lost: Callable[[Worker, str], None] = lambda worker, reason: None
        self.on_refused: Callable[[WorkerKey, str], None] = lambda key, reason: None
        self._workers: dict[str, Worker] = {}
        self._retired: dict[WorkerKey, None] = {}
        """Incarnations that are gone for good, the oldest first."""
        self.model: ModelFacts | None = None
        self.known_purposes: set[Task] = set()
        """Purposes of all workers that ever registered."""
        self.expected: Mapping[str, str] = {}
        """Roles, by worker id, of the workers that the launcher keeps running and restarts when they die."""
        self._last_sweep = time.monotonic()

    def __iter__(self) -> Iterator[Worker]:
        """Iterate over the current workers, in any thread."""
        return iter(list(self._workers.values()))

    def live(self) -> list[Worker]:
        """Return the workers that may get requests."""
        return [w for w in self if w.takes_requests and not w.role.holds_draft]

    def awaited(self) -> list[str]:
        """Return the ids of the workers that are not ready for requests now but will be."""
        ready = {worker.key.worker_id for worker in self.live()}
        takers = (worker_id for worker_id, role in self.expected.items() if not ROLES[role].holds_draft)
        return [worker_id for worker_id in takers if worker_id not in ready]

    def named(self, worker_id: str) -> Worker:
        """Return the worker's current incarnation. Raises KeyError if it has none."""
        return self._workers[worker_id]

    def current_of(self, worker_id: str | None) -> Worker | None:
        """Return the worker's current incarnation, or None."""
        return self._workers.get(worker_id) if worker_id is not None else None

    def named_by(self, incarnations: Collection[str]) -> frozenset[str]:
        """Return the ids of the workers whose current incarnation is among these."""
        return frozenset(name for name, w in self._workers.items() if w.key.incarnation in incarnations)

    def current(self, worker_id: str, incarnation: str) -> Worker | None:
        """Return the worker if this is its current incarnation."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.key.incarnation == incarnation else None

    def is_retired(self, worker_id: str, incarnation: str) -> bool:
        """Return whether this incarnation is gone for good."""
        return WorkerKey(worker_id, incarnation) in self._retired

    def register(self, register: Register) -> Worker | None:
        """Make this incarnation the current one. Return None if it is stale or serves another model."""
        key = WorkerKey(register.address.worker_id, register.address.incarnation)
        if key in self._retired:
            return None
        role = ROLES.get(register.role)
        if role is None:
            self.refuse(key, f"there is no role {register.role!r}")
            return None
        problem = protocol_problem(register.protocol, register.release, "the router", "the worker")
        if not problem and not role.holds_draft:
            problem = self._model_problem(register)
        if problem:
            self.refuse(key, problem)
            return None
        known = self._workers.get(key.worker_id)
        if known is not None and known.key == key:
            self.note_message(known)
            self.on_registered(known)
            return known
        worker = Worker(register, role, self._block_size, self._shared, self._max_rows)
        self._workers[key.worker_id] = worker
        self._group_by_host()
        self.known_purposes.add(role.purpose)
        self.cluster.remove(key.worker_id)
        self.changed(worker)
        logger.debug("worker %s (%s, incarnation %s) registered", key.worker_id, role.name, key.incarnation)
        self.on_registered(worker)
        if known is not None:
            self._retire(known, "it was restarted")
        return worker

    def refuse(self, key: WorkerKey, reason: str) -> None:
        """Refuse a worker that asked to register."""
        logger.error("worker %s is refused: %s", key.worker_id, reason)
        self.on_refused(key, reason)

    def _model_problem(self, register: Register) -> str:
        facts = ModelFacts(
            register.max_model_len, register.vocab_size, tuple(register.eos_token_ids), register.weights
        )
        if self.model is None:
            self.model = facts
        pairs = zip(ModelFacts._fields, facts, self.model, strict=True)
        differing = [f"{name} {own!r}, the cluster {known!r}" for name, own, known in pairs if own != known]
        return f"the worker has {', '.join(differing)}" if differing else ""

    def update(self, state: WorkerState) -> bool:
        """Process a heartbeat. Return False if it is not from a current incarnation."""
        worker = self.current(state.worker_id, state.incarnation)
        if worker is None:
            return False
        worker.update(state)
        if not worker.is_stalled:
            self.note_message(worker)
        return True

    def changed(self, worker: Worker) -> None:
        """Update the cluster after a change of the worker's load, or of whether it may get requests."""
        if self._workers.get(worker.key.worker_id) is not worker:
            return
        if worker.takes_requests and not worker.is_suspect:
            worker.update_load()
            self.cluster.put(worker.load)
        else:
            self._take_out(worker)

    def note_message(self, worker: Worker) -> None:
        worker.silence_s = 0.0
        worker.is_reachable = True
        if not worker.live:
            logger.warning("worker %s speaks again", worker.key.worker_id)
            worker.live = True
        self.changed(worker)

    def dismiss(self, worker: Worker) -> None:
        """Remove a drained worker, which has no requests left."""
        worker.live = False
        self._remember_retired(worker.key)
        if self._workers.get(worker.key.worker_id) is worker:
            self._remove(worker.key.worker_id)

    def drain(self, worker: Worker) -> None:
        """Give the worker no more requests."""
        worker.draining = True
        self.changed(worker)

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Remove an incarnation that the launcher declares gone for good."""
        worker = self.current(worker_id, incarnation)
        if worker is None:
            self._remember_retired(WorkerKey(worker_id, incarnation))
            return
        self._retire(worker, reason)
        self._remove(worker_id)

    def sweep(self, now: float) -> None:
        """Declare silent workers lost, and late ones suspect. Call every `WATCH_INTERVAL_S`.

        The router reads no messages while it is paused itself, so little of a pause counts as silence, and no
        worker becomes suspect right after it.
        """
        passed, self._last_sweep = now - self._last_sweep, now
        for worker in self._workers.values():
            worker.silence_s += min(passed, LONGEST_PAUSE_S)
        if passed < 2 * WATCH_INTERVAL_S:
            self._suspect(now)
        silent = [w for w in self._workers.values() if w.live and w.silence_s > self._timeout]
        for worker in silent:  # mark all first, or requests of one would be placed on the next
            worker.live = False
            self.changed(worker)
        for worker in silent:
            reason = f"it sent nothing for {worker.silence_s:.1f} s"
            if worker.is_stalled:
                reason = f"its loop has been stuck for {worker.state.stalled_s:.1f} s"
            self._lose(worker, reason)

    def _suspect(self, now: float) -> None:
        """Set which workers are suspect: late ones, if another worker of their purpose is not late or, after
        `ALONE_S`, one of the other purpose, which can serve whole requests.
        """
        late = [w for w in self if w.live and w.silence_s > LEAST_SILENCE_S and w.is_late(now)]
        punctual = [w for w in self if w.takes_requests and w not in late] if late else []
        purposes = {w.role.purpose for w in punctual}
        can_help = any(not w.role.holds_draft for w in punctual)
        suspects = [
            w
            for w in late
            if w.role.purpose in purposes or (can_help and not w.role.holds_draft and w.silence_s > ALONE_S)
        ]
        for worker in [w for w in self if w.is_suspect != (w in suspects)]:
            worker.is_suspect = not worker.is_suspect
            self.changed(worker)
            if worker.is_suspect:
                name = worker.key.worker_id
                logger.warning("worker %s is suspect: silent for %.2f s", name, worker.silence_s)

    def _take_out(self, worker: Worker) -> None:
        """Remove a worker from the cluster. If nobody there serves requests, the suspect workers return."""
        self.cluster.remove(worker.key.worker_id)
        if all(other.purpose == "draft" for other in self.cluster):
            for other in [w for w in self if w.is_suspect]:
                other.is_suspect = False
                self.changed(other)

    def _retire(self, worker: Worker, reason: str) -> None:
        self._remember_retired(worker.key)
        if worker.live:
            self._lose(worker, reason)

    def _remove(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        self._group_by_host()
        self._take_out(worker)

    def _group_by_host(self) -> None:
        hosts: dict[str, list[WorkerSnapshot]] = defaultdict(list)
        for worker in self._workers.values():
            if worker.host:
                hosts[worker.host].append(worker.load)
                worker.load.on_host = hosts[worker.host]

    def _remember_retired(self, key: WorkerKey) -> None:
        self._retired[key] = None
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]

    def _lose(self, worker: Worker, reason: str) -> None:
        worker.live = False
        self.changed(worker)
        logger.error("worker %s (incarnation %s) is lost: %s", *worker.key, reason)
        self.on_lost(worker, reason)
