"""What an autoscaler knows of each role: the counters of its requests, and its workers' load now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from router.demand import RoleDemand
from router.placement.interface import WorkerSnapshot
from router.registry import Worker


class RoleLoad(NamedTuple):
    """What the workers of one role have to do now.

    `workers` serve, and `coming` ones are being started. They decode `rows` with `context` tokens, hold
    `kv_usage` pools of KV, and prompts of `backlog_s` seconds wait there behind
    others. Each decodes `max_rows` at
    most. `demand` are the counters.
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
    """At `now` [s]. `room`: how many more workers of each role the nodes take."""

    now: float
    loads: Mapping[str, RoleLoad]
    room: Mapping[str, int]
    slo_ttft_s: float = inf
    slo_tpot_s: float = inf


def role_load(workers: Sequence[Worker], coming: int, demand: RoleDemand, max_rows: int) -> RoleLoad:
    """Of the workers of one role that take requests."""
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
    """To compute the prompts behind the first one."""
    share = 1 - 1 / load.prompts if load.prompts > 1 else 0.0
    return share * load.costs.chunks_s(load.prefill_tokens, 0, load.costs.chunk_tokens)
