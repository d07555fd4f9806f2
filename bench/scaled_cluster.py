"""A simulated cluster that scales itself by the router's decisions, and the best plan in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.cluster import ClusterLayout, SimulatedCluster
from planner.profile import Profile
from planner.request import SimulatedRequest
from planner.scenarios import Scenario, Study
from planner.worker import SimulatedWorker
from router.demand import RoleDemand
from router.registry import Worker
from router.scaling.decide import INTERVAL_S, ScalerState, ScalingDecision, ScalingPolicy, decide
from router.scaling.facts import ScalingFacts, role_load

NEARLY = 0.98


@dataclass(frozen=True)
class Elasticity:
    """How the cluster may change: a worker that is added serves after `start_s`, on one of `most_workers`
    places.
    """

    policy: ScalingPolicy
    start_s: float
    most_workers: int


class ScalingCluster(SimulatedCluster):
    """Begins as its layout says. `decisions` are those that were taken, with their times; `worker_s` what
    workers took, from the command that started each to its end.
    """

    def __init__(
        self, layout: ClusterLayout, profile: Profile, block_tokens: int, elasticity: Elasticity
    ) -> None:
        self._elasticity = elasticity
        most = {role: bounds.most for role, bounds in elasticity.policy.ranges.items()}
        self._names = [f"{role}-{number}" for role in most for number in range(elasticity.most_workers)]
        super().__init__(layout, profile, block_tokens)
        self._coming: dict[str, list[str]] = defaultdict(list)
        """The names of those that are being started, by role."""
        self._since = dict.fromkeys(self.workers, 0.0)
        self._scaler = ScalerState()
        self.worker_s = 0.0
        self.decisions: list[tuple[float, ScalingDecision]] = []

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        def tick() -> None:
            self._scale()
            if self.num_ended < len(requests):
                self.events.at(self.events.now + INTERVAL_S, tick)

        self.events.at(0.0, tick)
        super().run(requests)
        end = max(request.ended for request in requests)
        self.worker_s += sum(max(end - since, 0.0) for since in self._since.values())

    def _scale(self) -> None:
        for worker in [each for each in self.workers.values() if _is_empty(each)]:
            self._leave(worker)
        room = max(self._elasticity.most_workers - len(self._since), 0)
        loads = {
            role: role_load(
                self._serving(role),
                len(self._coming[role]),
                self.meter.demand.get(role, RoleDemand()),
                self._profile.max_num_seqs,
            )
            for role in self._elasticity.policy.ranges
        }
        facts = ScalingFacts(
            self.events.now,
            loads,
            dict.fromkeys(loads, room),
            self._layout.slo_ttft_s,
            self._layout.slo_tpot_s,
        )
        decision, self._scaler = decide(facts, self._elasticity.policy, self._scaler)
        if decision is None:
            return
        self.decisions.append((self.events.now, decision))
        for role, wanted in decision.targets.items():
            self._resize(role, wanted - loads[role].have)
        if decision.changes_role is not None:
            giver, taker = decision.changes_role
            self._drain(giver)
            self._add(taker, 0.0)

    def _serving(self, role: str) -> list[Worker]:
        known = [worker.known for worker in self.workers.values()]
        return [worker for worker in known if worker.role.name == role and worker.takes_requests]

    def _resize(self, role: str, change: int) -> None:
        for _ in range(change):
            self._add(role, self._elasticity.start_s)
        for _ in range(-change):
            if self._coming[role]:
                name = self._coming[role].pop()
                self.worker_s += self.events.now - self._since.pop(name)
            else:
                self._drain(role)

    def _add(self, role: str, start_s: float) -> None:
        name = next(n for n in self._names if n.startswith(f"{role}-") and n not in self._since)
        self._since[name] = self.events.now
        self._coming[role].append(name)
        self.events.at(self.events.now + start_s, lambda: self._join(role, name))

    def _join(self, role: str, name: str) -> None:
        if name in self._coming[role]:
            self._coming[role].remove(name)
            self.workers[name] = self._start(name, role, self._names)

    def _drain(self, role: str) -> None:
        least = min(
            self._serving(role), key=lambda worker: (worker.load.requests, -self._since[worker.key.worker_id])
        )
        self._registry.drain(least)

    def _leave(self, worker: SimulatedWorker) -> None:
        name = worker.known.key.worker_id
        self._registry.dismiss(worker.known)
        self._index.remove(worker.slot)
        del self.workers[name]
        self.worker_s += self.events.now - self._since.pop(name)


def _is_empty(worker: SimulatedWorker) -> bool:
    return worker.known.draining and not worker.known.outstanding_requests and not worker.engine.is_busy


def scaled(study: Study, elasticity: Elasticity, start: Scenario) -> tuple[float, ScalingCluster]:
    """The share of requests within the SLO, and the cluster at its end."""
    requests = study.simulated()
    cluster = ScalingCluster(start.layout(study.slo), study.profile, study.block_tokens, elasticity)
    cluster.run(requests)
    return sum(map(study.is_good, requests)) / len(requests), cluster


def windows(study: Study, seconds: float) -> Iterator[Study]:
    """The trace in pieces of so many seconds; those without requests are left out."""
    for _, requests in groupby(study.requests, key=lambda request: request.arrival // seconds):
        yield Study(study.profile, list(requests), study.block_tokens, study.slo)


def fewest(study: Study, most: Scenario, attainment: float) -> int:
    """Workers of the smallest layout that attains so much, with at most as many of each role as `most` has.

    Where the largest does not, nearly as much as that one counts. More workers are taken never to attain
    less, so each number of prefill workers goes on with as many decode workers as the one before needed.
    """
    asked = min(attainment, NEARLY * attained(study, most))
    best, decode = most.prefill + most.decode, most.decode
    for prefill in range(1, most.prefill + 1):
        while decode >= 1 and attained(study, Scenario(most.mode, prefill, decode)) >= asked:
            best = min(best, prefill + decode)
            decode -= 1
        if prefill + 1 >= best:
            break
    return best


def attained(study: Study, scenario: Scenario) -> float:
    """The share of requests within the SLO."""
    requests, _ = study.run(scenario.layout(study.slo))
    return sum(map(study.is_good, requests)) / len(requests)
