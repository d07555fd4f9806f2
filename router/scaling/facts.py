"""The autoscaler's facts about each role: its requests' counters and its workers' current load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from router.placement.interface import WorkerSnapshot
from router.workers.demand import RoleDemand
from router.workers.registry import Worker


class RoleLoad(NamedTuple):
    """The current load of the workers of one role.

    `workers` serve and `coming` more are being started. They decode `rows` with `context` tokens, hold
    `kv_usage` pools of KV, and prompts of `backlog_s` seconds wait there for others. Each decodes at most
    `max_rows`. `demand` has the counters.
    """

    workers: int
    coming: int = 0
    rows: float = 0.0
    context: float = 0.0
    kv_usage: float = 0.0
    backlog_s: float = 0.0
    max_rows: int = 64
    costs: StepCosts = UNKNOWN_COSTS
    demand: RoleDemand = RoleDemand()

    @property
    def have(self) -> int:
        return self.workers + self.coming


class ScalingFacts(NamedTuple):
    """The facts at `now` [s]. `room`: how many more workers of each role the nodes can hold."""

    now: float
    loads: Mapping[str, RoleLoad]
    room: Mapping[str, int]
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf


def role_load(workers: Sequence[Worker], coming: int, demand: RoleDemand, max_rows: int) -> RoleLoad:
    """Return the load of workers of one role that accept requests."""
    loads = [worker.load for worker in workers]
    return RoleLoad(
        workers=len(loads),
        coming=coming,
        rows=sum(load.rows for load in loads),
        context=sum(load.context_tokens for load in loads),
        kv_usage=sum(load.kv_usage for load in loads),
        backlog_s=sum(map(_waiting_s, loads)),
        max_rows=max_rows,
        costs=loads[0].costs if loads else UNKNOWN_COSTS,
        demand=demand + RoleDemand(),
    )


def _waiting_s(load: WorkerSnapshot) -> float:
    """Return the time to compute the prompts after the first one."""
    share = 1 - 1 / load.prompts if load.prompts > 1 else 0.0
    return share * load.costs.chunks_s(load.prefill_tokens, 0, load.costs.chunk_tokens)
