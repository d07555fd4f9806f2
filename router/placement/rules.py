"""Rules that choose a worker for one task, without regard to the other task or to costs."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest

from protocol.roles import Task
from router.placement.cluster import Cluster, hashed, load_key
from router.placement.interface import PolicyState, RequestFacts, WorkerSnapshot

Chosen = WorkerSnapshot | None
Rule = Callable[[RequestFacts, Cluster, Task, PolicyState], Chosen]

OVERLOAD = 1.5
"""Most load of a worker chosen for its cached prefix, as a multiple of the mean (both plus one)."""
_MIN_CACHED_SHARE = 0.5
"""Least cached share of a prompt for which a worker is chosen by its cache."""


def round_robin(request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState) -> Chosen:
    """Choose one worker after the other, by name."""
    return cluster.at(task, state.turn, request.avoid)


def least_loaded(request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState) -> Chosen:
    """Choose the worker with the fewest prompt tokens for prefill, or the fewest requests for decode."""
    return next(iter(cluster.least_loaded(task, 1, request.avoid)), None)


def power_of_two(request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState) -> Chosen:
    """Choose the less loaded of two random workers."""
    count = cluster.count(task)
    if count == 0:
        return None
    first = hashed(f"{state.seed} {state.turn} {task}") % count
    step = 1 + hashed(f"{state.seed} {state.turn} {task}, second") % max(count - 1, 1)
    two = [cluster.at(task, index, request.avoid) for index in (first, first + step)]
    return min((worker for worker in two if worker is not None), key=load_key, default=None)


def cache_aware(request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState) -> Chosen:
    """Choose a worker that has half of the prompt cached and is not overloaded, else the least loaded one."""
    for worker in holders(request, cluster, task, 1):
        share = request.cached_tokens[worker.worker_id] / max(request.num_tokens, 1)
        if share >= _MIN_CACHED_SHARE and not is_overloaded(worker, cluster):
            return worker
    return least_loaded(request, cluster, task, state)


def is_overloaded(worker: WorkerSnapshot, cluster: Cluster) -> bool:
    return worker.requests + 1 > OVERLOAD * (cluster.mean_requests(worker.purpose) + 1)


def holders(request: RequestFacts, cluster: Cluster, task: Task, count: int) -> list[WorkerSnapshot]:
    """Return the workers for this task with the longest cached prefix, the longest first."""
    found: list[WorkerSnapshot] = []
    cached = request.cached_tokens
    for name in nlargest(2 * count, cached, key=cached.__getitem__) if cached else ():
        worker = cluster.get(name)
        if worker is not None and worker.purpose == task and name not in request.avoid:
            found.append(worker)
    return found[:count]
