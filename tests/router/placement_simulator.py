"""Simulates workers step by step, under the policies that the router runs.

A worker computes prompts one after the other in chunks, beside its decoding rows. The router's `Loads` count
what is sent and answered at once.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from protocol.roles import ROLES
from router.placement import placement_policy
from router.placement.cluster import Cluster
from router.placement.interface import (
    LinkSpeed,
    Placement,
    PolicyState,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)
from router.placement.predict import refusal
from tests.router.placed import COSTS

FAST = LinkSpeed(1e-4, 4e9)
SLOW = LinkSpeed(1e-4, 1e7)


@dataclass(eq=False)
class Job:
    """A request. Jobs with the same `prefix` share that prefix; `at` is the arrival time."""

    at: float
    num_tokens: int = 256
    output_tokens: int = 64
    prefix: str = ""
    session: str = ""
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf
    refusal: Refusal | None = None
    left: int = 0
    computed: int = 0
    uncached: int = 0
    computed_beside: int = 0
    workers: dict = field(default_factory=dict)
    first_s: float = 0.0
    end_s: float = 0.0


class SimulatedWorker:
    def __init__(self, name: str, role: str) -> None:
        self.load = WorkerSnapshot(name, ROLES[role].tasks, costs=COSTS)
        self.queue: list[Job] = []
        self.rows: list[Job] = []
        self.cached: set[str] = set()
        self.stepping: list[Job] = []
        self.chunk = 0
        self.is_busy = False


class Simulation:
    def __init__(self, policy: str, names: Iterable[str], link: LinkSpeed = FAST) -> None:
        self._policy = placement_policy(policy)
        self._state = PolicyState()
        self.workers = {name: SimulatedWorker(name, name.partition("-")[0]) for name in names}
        self.cluster = Cluster(worker.load for worker in self.workers.values())
        self.placed: Counter[str] = Counter()
        for worker in self.workers.values():
            worker.load.links = dict.fromkeys(self.workers, link)
        self._order = itertools.count(1)
        self._ties = itertools.count()

    def run(self, jobs: list[Job]) -> list[Job]:
        """Run all jobs to their end. Refused ones do not begin."""
        events = [(job.at, next(self._ties), job) for job in jobs]
        heapq.heapify(events)
        while events:
            now, _, event = heapq.heappop(events)
            if isinstance(event, Job):
                started = self.place(event)
            else:
                started = self._finish_step(event, now)
            for worker in started:
                if not worker.is_busy and (worker.queue or worker.rows):
                    worker.is_busy = True
                    heapq.heappush(events, (now + self._begin_step(worker), next(self._ties), worker))
        return jobs

    def place(self, job: Job) -> list[SimulatedWorker]:
        """Place a job and return the workers that now have work."""
        cached = {}
        if job.prefix:
            share = job.num_tokens * 9 // 10
            cached = {name: share for name, worker in self.workers.items() if job.prefix in worker.cached}
        request = RequestFacts(
            job.num_tokens,
            job.output_tokens,
            cached_tokens=cached,
            session=job.session,
            slo_ttft_s=job.slo_ttft_s,
            slo_tpot_s=job.slo_tpot_s,
        )
        placement, self._state = self._policy.place(request, self.cluster, self._state)
        assert isinstance(placement, Placement)
        job.refusal = refusal(request, self.cluster, placement)
        if job.refusal is not None:
            return []
        job.workers = {task: self.workers[name] for task, name in placement.workers.items()}
        first, decode = next(iter(job.workers.values())), job.workers["decode"]
        job.uncached = job.num_tokens - cached.get(placement.prefix or first.load.worker_id, 0)
        job.left = job.output_tokens
        for worker in job.workers.values():
            self.placed[worker.load.worker_id] += 1
            self._count(worker, requests=1)
            worker.load.last_placed = next(self._order)
        self._count(first, prompts=1, prefill_tokens=job.uncached)
        job.computed_beside = job.uncached if first is decode else 0
        self._count(decode, rows=1, context_tokens=job.num_tokens, computed_tokens=job.computed_beside)
        first.queue.append(job)
        return [first]

    def _count(self, worker: SimulatedWorker, **changes: float) -> None:
        for name, change in changes.items():
            setattr(worker.load, name, getattr(worker.load, name) + change)
        self.cluster.put(worker.load)

    def _begin_step(self, worker: SimulatedWorker) -> float:
        """Begin a step and return its seconds. Arrivals meanwhile wait for the next step."""
        worker.stepping = list(worker.rows)
        context = sum(job.num_tokens for job in worker.stepping)
        seconds = COSTS.decode_s(len(worker.stepping), context)
        worker.chunk = 0
        if worker.queue:
            job = worker.queue[0]
            worker.chunk = min(job.uncached - job.computed, COSTS.chunk_tokens)
            seconds += COSTS.chunks_s(worker.chunk, job.computed, COSTS.chunk_tokens)
        return seconds

    def _finish_step(self, worker: SimulatedWorker, now: float) -> list[SimulatedWorker]:
        started = [worker]
        worker.is_busy = False
        for job in worker.stepping:
            job.left -= 1
            if job.left <= 0:
                job.end_s = now
                worker.rows.remove(job)
                self._count(worker, requests=-1, rows=-1, context_tokens=-job.num_tokens)
                self._count(worker, computed_tokens=-job.computed_beside)
        if worker.chunk:
            job = worker.queue[0]
            job.computed += worker.chunk
            if job.computed >= job.uncached:
                worker.queue.pop(0)
                started.append(self._answer(job, worker, now))
        return started

    def _answer(self, job: Job, first: SimulatedWorker, now: float) -> SimulatedWorker:
        """Return the worker that decodes the job after its first token."""
        decode = job.workers["decode"]
        job.first_s = now - job.at
        self._count(first, prompts=-1, prefill_tokens=-job.uncached)
        if decode is not first:
            self._count(first, requests=-1)
        for worker in (first, decode):
            worker.cached.add(job.prefix)
        decode.rows.append(job)
        return decode
