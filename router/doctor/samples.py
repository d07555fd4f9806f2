"""Samples of the cluster: totals and loads at one moment, as the router knows them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.roles import Task
from protocol.speculation import StepTimeState
from router.state import RouterState
from router.workers.registry import Worker


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's values. `rows` decode here now or later, `prompts` await their first token from here, and
    `held` requests still wait in the router. `exposed_s` and `sent_bytes` are of KV transfers, by peer.
    """

    id: str
    tasks: tuple[Task, ...]
    running: int = 0
    waiting: int = 0
    rows: float = 0.0
    prompts: float = 0.0
    held: int = 0
    context_tokens: float = 0.0
    kv_usage: float = 0.0
    kv_tokens: float = 0.0
    steps: int = 0
    preemptions: int = 0
    counters: dict[str, float] = {}
    costs: StepCosts = UNKNOWN_COSTS
    step_time: StepTimeState = StepTimeState()
    links: dict[str, str] = {}
    exposed_s: dict[str, float] = {}
    sent_bytes: dict[str, float] = {}


class ClusterSample(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the router and all workers at `at` monotonic seconds.

    `totals` holds the router's metrics by name, `refused` the number of refused requests by reason.
    """

    at: float
    workers: list[WorkerSample] = []
    live: int = 0
    parked: int = 0
    max_num_seqs: int = 0
    totals: dict[str, float] = {}
    refused: dict[str, float] = {}

    def worker(self, worker_id: str) -> WorkerSample | None:
        return next((worker for worker in self.workers if worker.id == worker_id), None)


def sample(state: RouterState) -> ClusterSample:
    totals, refused = _totals(state)
    return ClusterSample(
        at=time.monotonic(),
        workers=[_worker(state, worker) for worker in state.registry.live()],
        live=len(state.journal),
        parked=state.placer.num_parked,
        max_num_seqs=state.config.max_num_seqs,
        totals=totals,
        refused=refused,
    )


def _totals(state: RouterState) -> tuple[dict[str, float], dict[str, float]]:
    """Return the router's own metrics, each summed over its labels, and the refused requests by reason."""
    totals: defaultdict[str, float] = defaultdict(float)
    refused: dict[str, float] = {}
    for name, labels, value in state.metrics.own_samples():
        totals[name] += value
        if name == "requests_refused_total":
            refused[labels["reason"]] = value
    return dict(totals), refused


def _worker(state: RouterState, worker: Worker) -> WorkerSample:
    load, told = worker.load, worker.state
    speculation = told.speculation
    return WorkerSample(
        id=worker.key.worker_id,
        tasks=worker.role.tasks,
        running=told.num_running,
        waiting=told.num_waiting,
        rows=load.rows,
        prompts=load.prompts,
        held=state.placer.ahead.num_held(worker),
        context_tokens=load.context_tokens,
        kv_usage=told.kv_usage,
        kv_tokens=load.kv_tokens,
        steps=told.steps,
        preemptions=told.num_preemptions,
        counters=told.counters,
        costs=told.costs,
        step_time=speculation.step_time if speculation is not None else StepTimeState(),
        links={pair.peer: pair.transport for pair in told.pairs if pair.in_use},
        exposed_s=_by_peer(worker, {"busy_seconds": 1.0, "hidden_seconds": -1.0}),
        sent_bytes=_by_peer(worker, {"bytes": 1.0}),
    )


def _by_peer(worker: Worker, weights: Mapping[str, float]) -> dict[str, float]:
    """Return weighted sums of a worker's `kv_transfer_NAME_total` counters, by peer."""
    sums: defaultdict[str, float] = defaultdict(float)
    for pair in worker.state.pairs:
        for name, weight in weights.items():
            sums[pair.peer] += weight * pair.counters.get(f"kv_transfer_{name}_total", 0.0)
    return dict(sums)
