"""What requests ask of each role, in counters that an autoscaler compares from one time to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Protocol

import msgspec

from protocol.roles import Task
from router.placement.interface import Refusal
from router.registry import Worker


class RoleDemand(msgspec.Struct):
    """Counters of a role's requests since its router's start, which only rise.

    `prompts` were to be computed there, in `prompt_s` seconds of a worker with nothing else to do; the sum of
    their squares is `prompt_s2`. Of `judged` first tokens and answers `missed` came later than their SLO
    asks, or were refused for that.
    """

    prompts: int = 0
    prompt_s: float = 0.0
    prompt_s2: float = 0.0
    judged: int = 0
    missed: int = 0

    def __sub__(self, other: RoleDemand) -> RoleDemand:
        """Never below 0: the counters of a router that is started anew begin there."""
        return self._with(other, -1)

    def __add__(self, other: RoleDemand) -> RoleDemand:
        return self._with(other, 1)

    def _with(self, other: RoleDemand, sign: int) -> RoleDemand:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return RoleDemand(*(max(one + sign * another, 0) for one, another in pairs))


Demand = Mapping[str, RoleDemand]
"""By the roles' names."""


def sum_of(demands: Iterable[Demand]) -> dict[str, RoleDemand]:
    found: dict[str, RoleDemand] = {}
    for demand in demands:
        for role, counted in demand.items():
            found[role] = found.get(role, RoleDemand()) + counted
    return found


class PromptToCompute(Protocol):
    """A live request, or a simulated one: so many tokens, of which its worker had to compute some."""

    num_uncached: int

    @property
    def num_prefill_tokens(self) -> int: ...


def alone_s(request: PromptToCompute, worker: Worker) -> float:
    """To compute the prompt on a worker with nothing else to do."""
    costs, tokens = worker.load.costs, max(request.num_uncached, 1)
    chunk = max(costs.chunk_tokens, 1)
    before = request.num_prefill_tokens - request.num_uncached
    return costs.chunks_s(tokens, before, chunk) + -(-tokens // chunk) * costs.step_s


class DemandMeter:
    """Counts what the requests of one router, or of a simulation, ask of the roles."""

    def __init__(self) -> None:
        self.demand: dict[str, RoleDemand] = {}

    def placed(self, request: PromptToCompute, worker: Worker) -> None:
        """The worker is to compute its prompt."""
        seconds = alone_s(request, worker)
        counted = self._of(worker.role.name)
        counted.prompts += 1
        counted.prompt_s += seconds
        counted.prompt_s2 += seconds * seconds

    def answered(self, request: PromptToCompute, worker: Worker, ttft_s: float, slo_s: float) -> None:
        """The worker has brought its first token. A prompt that is too long for its SLO tells nothing."""
        if alone_s(request, worker) <= slo_s:
            self._judge(worker, ttft_s, slo_s)

    def finished(self, worker: Worker, tpot_s: float, slo_s: float) -> None:
        """The worker has brought its other tokens."""
        self._judge(worker, tpot_s, slo_s)

    def _judge(self, worker: Worker, seconds: float, slo_s: float) -> None:
        if slo_s < inf:
            counted = self._of(worker.role.name)
            counted.judged += 1
            counted.missed += seconds > slo_s

    def refused(self, refusal: Refusal, workers: Iterable[Worker]) -> None:
        """A request would have missed its SLO as these workers are too few."""
        if refusal.missed is None or not refusal.waiting_helps:
            return
        purposes = {worker.role.purpose: worker.role.name for worker in workers}
        task: Task = "prefill" if refusal.missed == "slo_ttft" and "prefill" in purposes else "decode"
        counted = self._of(purposes.get(task, task))
        counted.judged += 1
        counted.missed += 1

    def _of(self, role: str) -> RoleDemand:
        return self.demand.setdefault(role, RoleDemand())
