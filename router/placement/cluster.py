"""The live workers as policies see them: by name, and for each purpose the least loaded first.

Each change keeps the order, so that a decision among thousands of workers looks at a few. Loads that are
negative, infinite or NaN count as 0 in the order.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from protocol.roles import Task
from router.placement.interface import WorkerSnapshot

LoadKey = tuple[float, float, float, int, str]


@dataclass(slots=True)
class _Purpose:
    """The workers of one purpose. `hashes` has the hash of each name, in the order of `names`."""

    by_load: list[LoadKey] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    hashes: np.ndarray | None = None
    requests: float = 0.0


class Cluster:
    def __init__(self, workers: Iterable[WorkerSnapshot] = ()) -> None:
        self._workers: dict[str, WorkerSnapshot] = {}
        self._keys: dict[str, tuple[Task, LoadKey, float]] = {}
        self._purposes: defaultdict[Task, _Purpose] = defaultdict(_Purpose)
        self.last_placed = 0
        """Largest `last_placed` of all workers."""
        for worker in workers:
            self.put(worker)

    def put(self, worker: WorkerSnapshot) -> None:
        """Add a worker, or note that its load has changed."""
        key = load_key(worker)
        known = self._keys.get(worker.worker_id)
        self._workers[worker.worker_id] = worker
        self.last_placed = max(self.last_placed, worker.last_placed)
        if known is not None and known[:2] == (worker.purpose, key):
            return
        group = self._purposes[worker.purpose]
        if known is None or known[0] != worker.purpose:
            self.remove(worker.worker_id)
            self._workers[worker.worker_id] = worker
            bisect.insort(group.names, worker.worker_id)
            group.hashes = None
        else:
            del group.by_load[bisect.bisect_left(group.by_load, known[1])]
            group.requests -= known[2]
        requests = sane(worker.requests)
        bisect.insort(group.by_load, key)
        group.requests += requests
        self._keys[worker.worker_id] = worker.purpose, key, requests

    def remove(self, worker_id: str) -> None:
        known = self._keys.pop(worker_id, None)
        self._workers.pop(worker_id, None)
        if known is None:
            return
        group = self._purposes[known[0]]
        del group.by_load[bisect.bisect_left(group.by_load, known[1])]
        del group.names[bisect.bisect_left(group.names, worker_id)]
        group.hashes = None
        group.requests -= known[2]

    def __iter__(self) -> Iterator[WorkerSnapshot]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str | None) -> WorkerSnapshot | None:
        return self._workers.get(worker_id) if worker_id is not None else None

    def count(self, purpose: Task) -> int:
        return len(self._purposes[purpose].names)

    def mean_requests(self, purpose: Task) -> float:
        group = self._purposes[purpose]
        return group.requests / len(group.names) if group.names else 0.0

    def least_loaded(self, purpose: Task, count: int, avoid: Collection[str] = ()) -> list[WorkerSnapshot]:
        """Return up to `count` workers, the least loaded first; workers in `avoid` only to fill up."""
        group = self._purposes[purpose]
        names = (key[-1] for key in group.by_load if key[-1] not in avoid)
        found = [self._workers[name] for name in islice(names, count)]
        return found or [self._workers[key[-1]] for key in group.by_load[:count]]

    def at(self, purpose: Task, index: int, avoid: Collection[str] = ()) -> WorkerSnapshot | None:
        """Return the worker at `index` modulo the number of names, or the next one that is not in `avoid`."""
        group = self._purposes[purpose]
        if not group.names:
            return None
        size = len(group.names)
        names = (group.names[(index + step) % size] for step in range(size))
        first = group.names[index % size]
        return self._workers[next((name for name in names if name not in avoid), first)]

    def home(self, purpose: Task, session: str, avoid: Collection[str] = ()) -> WorkerSnapshot | None:
        """Return the session's worker by rendezvous hashing: few sessions move when workers come or leave."""
        group = self._purposes[purpose]
        if not group.names:
            return None
        if group.hashes is None:
            group.hashes = np.array([hashed(name) for name in group.names], dtype=np.uint64)
        scores = _mix(group.hashes ^ np.uint64(hashed(session)))
        best = group.names[int(scores.argmax())]
        if best in avoid:
            order = [group.names[index] for index in np.argsort(scores)[::-1]]
            best = next((name for name in order if name not in avoid), best)
        return self._workers[best]


def load_key(worker: WorkerSnapshot) -> LoadKey:
    """Return a worker's sort key: prompt tokens for prefill, requests for decode, then `last_placed`."""
    requests, tokens, usage = sane(worker.requests), sane(worker.prefill_tokens), sane(worker.kv_usage)
    if worker.purpose == "prefill":
        return tokens, requests, usage, worker.last_placed, worker.worker_id
    return requests, usage, tokens, worker.last_placed, worker.worker_id


def sane(value: float) -> float:
    """Return the value, or 0 if it is negative, infinite or NaN."""
    return value if 0 <= value < float("inf") else 0.0


def hashed(text: str) -> int:
    """Return 64 bits that look random and are the same in each process."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits with SplitMix64's finalizer."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
