"""Rules that choose a worker for one task, each blind to the other task and to what things cost."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nlargest

from protocol.roles import Task
from router.placement.cluster import Cluster, load_key
from router.placement.interface import PolicyState, RequestFacts, WorkerSnapshot

Rule = Callable[[RequestFacts, Cluster, Task, PolicyState], WorkerSnapshot | None]

OVERLOAD = 1.5
"""Times the mean load, each counted with one request more, above which nobody is sent to a worker for its
cache."""
_MIN_CACHED_SHARE = 0.5
"""Of a prompt, that must be cached for it to be sent there."""


def round_robin(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    """One after the other, by name."""
    return cluster.at(task, state.turn, request.avoid)


def least_loaded(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    """The fewest prompt tokens ahead for prefill, the fewest requests for decode."""
    return next(iter(cluster.least_loaded(task, 1, request.avoid)), None)


def power_of_two(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    """The less loaded of two that chance names."""
    count = cluster.count(task)
    if count == 0:
        return None
    first = _random(state, task) % count
    step = 1 + _random(state, task + "'") % max(count - 1, 1)
    two = [cluster.at(task, index, request.avoid) for index in (first, first + step)]
    return min((worker for worker in two if worker is not None), key=load_key, default=None)


def cache_aware(
    request: RequestFacts, cluster: Cluster, task: Task, state: PolicyState
) -> WorkerSnapshot | None:
    """Who has most of the prompt cached, if that is half of it and it has not too much to do; else the least
    loaded.
    """
    for worker in holders(request, cluster, task, 1):
        share = request.cached_tokens[worker.worker_id] / max(request.num_tokens, 1)
        if share >= _MIN_CACHED_SHARE and not is_overloaded(worker, cluster):
            return worker
    return least_loaded(request, cluster, task, state)


def is_overloaded(worker: WorkerSnapshot, cluster: Cluster) -> bool:
    return worker.requests + 1 > OVERLOAD * (cluster.mean_requests(worker.purpose) + 1)


def holders(request: RequestFacts, cluster: Cluster, task: Task, count: int) -> list[WorkerSnapshot]:
    """Those for this task with the most of the prompt cached, the best first."""
    found: list[WorkerSnapshot] = []
    cached = request.cached_tokens
    for name in nlargest(2 * count, cached, key=cached.__getitem__) if cached else ():
        worker = cluster.get(name)
        if worker is not None and worker.purpose == task and name not in request.avoid:
            found.append(worker)
    return found[:count]


def _random(state: PolicyState, salt: str) -> int:
    """SplitMix64 of the turn."""
    value = (state.seed + state.turn * 0x9E3779B97F4A7C15 + sum(salt.encode()) * 0xD1B54A32D192ED03) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)
