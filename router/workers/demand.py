"""The demand that requests put on each role, as counters that an autoscaler compares over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from protocol.roles import Task
from router.placement.interface import Refusal
from router.workers.assignment import Assignment
from router.workers.registry import Worker


class RoleDemand(msgspec.Struct):
    """Counters of a role's requests since the router's start. They only rise.

    `prompts` were assigned to the role for prefill; they take `prompt_s` seconds of an otherwise idle worker,
    and `prompt_s2` sums their squares. `judged` counts first tokens and finished answers with an SLO, and
    refusals; `missed` those that were later than their SLO or refused because of it.
    """

    prompts: int = 0
    prompt_s: float = 0.0
    prompt_s2: float = 0.0
    judged: int = 0
    missed: int = 0

    def __sub__(self, other: RoleDemand) -> RoleDemand:
        """Subtract, never below 0: the counters of a restarted router begin at 0."""
        return self._with(other, -1)

    def __add__(self, other: RoleDemand) -> RoleDemand:
        return self._with(other, 1)

    def _with(self, other: RoleDemand, sign: int) -> RoleDemand:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return RoleDemand(*(max(one + sign * another, 0) for one, another in pairs))


Demand = Mapping[str, RoleDemand]
"""Demand by role name."""


def sum_of(demands: Iterable[Demand]) -> dict[str, RoleDemand]:
    found: dict[str, RoleDemand] = {}
    for demand in demands:
        for role, counted in demand.items():
            found[role] = found.get(role, RoleDemand()) + counted
    return found


def alone_s(assignment: Assignment) -> float:
    """Return the seconds that the first worker takes to compute the prompt if it has nothing else to do."""
    costs, before = assignment.first.load.costs, assignment.num_tokens - assignment.num_uncached
    return costs.prompt_s(assignment.num_uncached, before, costs.chunk_tokens)


class DemandMeter:
    """Counts the demand that one router's or a simulation's requests put on the roles."""

    def __init__(self) -> None:
        self.demand: dict[str, RoleDemand] = {}

    def placed(self, assignment: Assignment) -> None:
        """Count a prompt that its first worker has to compute."""
        seconds = alone_s(assignment)
        counted = self._of(assignment.first.role.name)
        counted.prompts += 1
        counted.prompt_s += seconds
        counted.prompt_s2 += seconds * seconds

    def answered(self, assignment: Assignment, ttft_s: float, slo_s: float) -> None:
        """Judge the first worker's first token, unless the prompt is too long for its SLO."""
        if alone_s(assignment) <= slo_s:
            self._judge(assignment.first, ttft_s, slo_s)

    def finished(self, worker: Worker, tpot_s: float, slo_s: float) -> None:
        """Judge the other tokens of a finished answer, which this worker sent."""
        self._judge(worker, tpot_s, slo_s)

    def _judge(self, worker: Worker, seconds: float, slo_s: float) -> None:
        if slo_s < inf:
            counted = self._of(worker.role.name)
            counted.judged += 1
            counted.missed += seconds > slo_s

    def refused(self, refusal: Refusal, workers: Iterable[Worker]) -> None:
        """Count a request that was refused because these workers are too few for its SLO."""
        if refusal.missed is None or not refusal.waiting_helps:
            return
        purposes = {worker.role.purpose: worker.role.name for worker in workers}
        task: Task = "prefill" if refusal.missed == "slo_ttft" and "prefill" in purposes else "decode"
        counted = self._of(purposes.get(task, task))
        counted.judged += 1
        counted.missed += 1

    def _of(self, role: str) -> RoleDemand:
        return self.demand.setdefault(role, RoleDemand())
