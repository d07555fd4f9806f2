"""Starts and drains workers until there are as many as an operator or the autoscaler wants, and restarts them
one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from protocol.roles import ROLES
from router.dispatch import Core
from router.dispatch.drainer import Drainer, DrainReport
from router.errors import ApiError
from router.scaling.decide import (
    INTERVAL_S,
    RoleLoad,
    ScalerState,
    ScalingDecision,
    ScalingFacts,
    ScalingPolicy,
    decide,
    role_load,
)
from router.scaling.interface import (
    AskToScale,
    ChangeTurns,
    ScaleRequest,
    ScalingEvent,
    ScalingLog,
    refuse_to_scale,
)
from router.workers.assignment import Demand, DemandMeter, RoleDemand, sum_of
from router.workers.registry import Registry, Worker

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.02
GRACE_S = 5.0
"""[seconds] Added to the launcher's own time-outs, so that these end first."""
MAX_GIVEN_UP = 1000


@dataclass
class ScaleReport(DrainReport):
    """A drain report that also lists the started and the drained workers."""

    started: list[str] = field(default_factory=list)
    drained: list[str] = field(default_factory=list)


class Scaler:
    """The changes of the number of workers, on the event loop. `ask` reaches the launcher."""

    def __init__(self, core: Core, drainer: Drainer, turns: ChangeTurns) -> None:
        self._config, _, self._registry, *_ = core
        self._drainer = drainer
        self._turns = turns
        self._given_up: dict[str, str] = {}
        """Reasons by worker id why the launcher could not start a worker, the oldest first."""
        self.ask: AskToScale = refuse_to_scale

    def gave_up(self, worker_id: str, reason: str) -> None:
        """Note that the launcher no longer tries to start this worker."""
        self._given_up[worker_id] = reason
        if len(self._given_up) > MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    async def scale(self, targets: Mapping[str, int]) -> ScaleReport:
        """Change the number of workers. Return when the new ones serve and the old ones are empty.

        Raises `ApiError` 409 with nothing changed, as during a restart; 503 if a worker did not start.
        """
        async with self._turns.hold("scaling"):
            return await self.resize(targets)

    async def resize(self, targets: Mapping[str, int]) -> ScaleReport:
        """Change the number of workers as part of another change; otherwise like `scale`."""
        began = time.monotonic()
        worth = [worker.key.worker_id for worker in least_worth(self._registry)]
        answer = await self.ask(ScaleRequest(targets=dict(targets), worth=worth))
        if answer.refusal:
            message = f"{answer.field}: {answer.refusal}"
            raise ApiError(409, message, param=answer.field or None, code="cannot_scale")
        report = ScaleReport(started=answer.started, drained=answer.leaving)
        drains = [asyncio.ensure_future(self.drain(worker_id)) for worker_id in answer.leaving]
        timeout_s = self._config.scale_timeout + self._config.start_timeout
        lacking = await self.await_serving(answer.started, timeout_s)
        for each in await asyncio.gather(*drains):
            report.add(each)
        report.seconds = time.monotonic() - began
        if lacking:
            raise ApiError(503, self._short(lacking), code="no_worker")
        return report

    async def await_serving(self, worker_ids: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Wait until all workers serve or were given up, or the time-out. Return why others do not serve."""
        deadline = time.monotonic() + timeout_s + GRACE_S
        for worker_id in worker_ids:
            self._given_up.pop(worker_id, None)
        while True:
            worker_ids = [each for each in worker_ids if not self._serves(each)]
            if time.monotonic() > deadline or self._given_up.keys() >= set(worker_ids):
                late = f"it was not ready within {timeout_s:g} s"
                return {each: self._given_up.get(each, late) for each in worker_ids}
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _serves(self, worker_id: str) -> bool:
        worker = self._registry.current_of(worker_id)
        return worker is not None and worker.takes_requests

    async def drain(self, worker_id: str) -> DrainReport:
        """Drain a worker. A worker that dies meanwhile counts as drained."""
        try:
            return await (await self._drainer.drain(worker_id))
        except ApiError as error:
            logger.warning("worker %s was to be drained: %s", worker_id, error)
            return DrainReport()

    def _short(self, lacking: Mapping[str, str]) -> str:
        there = Counter(worker.role.name for worker in self._registry if worker.takes_requests)
        runs = ", ".join(f"{count} {role}" for role, count in sorted(there.items()))
        reasons = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in lacking.items())
        return f"not all workers could be started: {reasons}. What runs goes on: {runs}"


def least_worth(workers: Registry) -> list[Worker]:
    """Return the workers, those whose loss costs least first: the fewest requests, then the youngest."""

    def worth(worker: Worker) -> tuple[float, float]:
        load = worker.load.requests if worker.takes_requests else -inf
        return load, -worker.since

    return sorted(workers, key=worth)


@dataclass
class RestartReport(DrainReport):
    """A drain report that also lists the restarted workers, and successors of those alone in their role."""

    restarted: list[str] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        workers, successors = (" ".join(each) or "none" for each in (self.restarted, self.successors))
        return f"{workers}; successors: {successors}; {super().__str__()}"


class Restarter:
    """Rolling restarts under load, one worker at a time, with no scaling meanwhile.

    A worker that is alone in its role gets a successor with another name, which serves before it leaves.
    """

    def __init__(self, core: Core, drainer: Drainer, scaler: Scaler, turns: ChangeTurns) -> None:
        self._config, _, self._registry, *_ = core
        self._drainer = drainer
        self._scaler = scaler
        self._turns = turns

    async def restart(self) -> RestartReport:
        """Restart all current workers. Return when each has been restarted or is gone.

        Raises `ApiError` 409 if nothing has changed, 503 if a worker did not come back; the others continue.
        """
        began, report = time.monotonic(), RestartReport()
        async with self._turns.hold("restart"):
            for worker in self._in_order():
                await self._restart(worker, report)
        report.seconds = time.monotonic() - began
        logger.info("restarted: %s", report)
        return report

    def _in_order(self) -> list[Worker]:
        """Return the live workers, first those that need a successor: if refused, nothing has changed."""
        workers = [worker for worker in self._registry if worker.live]
        return sorted(workers, key=lambda worker: (not self._is_alone(worker), worker.key.worker_id))

    def _is_alone(self, worker: Worker) -> bool:
        others = (other for other in self._registry if other is not worker and other.takes_requests)
        return all(other.role != worker.role for other in others)

    async def _restart(self, worker: Worker, report: RestartReport) -> None:
        worker_id = worker.key.worker_id
        if self._registry.current_of(worker_id) is not worker or worker.draining:
            return  # it died and its successor is new, or it leaves
        if self._is_alone(worker):
            scaled = await self._scaler.resize({worker.role.name: 2})
            report.successors += scaled.started
            drained = await self._scaler.drain(worker_id)
        else:
            drained = await self._empty(worker)
            lacking = await self._scaler.await_serving([worker_id], self._config.start_timeout)
            if lacking:
                done = ", ".join(report.restarted) or "none"
                reason = f"worker {worker_id} did not come back: {lacking[worker_id]}"
                raise ApiError(503, f"{reason}; restarted before it: {done}", code="no_worker")
        report.add(drained)
        report.restarted.append(worker_id)

    async def _empty(self, worker: Worker) -> DrainReport:
        """Drain a worker for its restart. A worker that dies meanwhile restarts too. Raises `ApiError`."""
        try:
            return await (await self._drainer.restart(worker.key.worker_id))
        except ApiError:
            if worker.live and self._registry.current_of(worker.key.worker_id) is worker:
                raise
            return DrainReport()


class Autoscaler:
    """The autoscaler. It runs on the event loop of one router at a time, which knows the others' demand.

    It uses the operators' `Scaler`. `room`: further workers of each role for which the nodes have room.
    """

    def __init__(self, core: Core, scaler: Scaler, drainer: Drainer, meter: DemandMeter) -> None:
        self._config, _, self._registry, self._metrics, _ = core
        self._scaler = scaler
        self._drainer = drainer
        self._meter = meter
        self._policy = ScalingPolicy(core.config.autoscale or {}, core.config.scale_down_after)
        self._state = ScalerState()
        self._due = 0.0
        self._changes_role = False
        """Whether a worker is between two roles and counts for neither."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.log = ScalingLog()
        self.room: Mapping[str, int] = {}

    def step(self, others: Demand) -> None:
        """Decide and act if it is time. To be called a few times a second, with other routers' demand."""
        now = time.monotonic()
        if now < self._due or not self._policy.ranges or self._registry.model is None or self._changes_role:
            return
        self._due = now + INTERVAL_S
        demand = sum_of((self._meter.demand, others))
        loads = {role: self._load(role, demand) for role in self._policy.ranges}
        ttft_s, tpot_s = self._config.slo_ttft or inf, self._config.slo_tpot or inf
        facts = ScalingFacts(now, loads, self.room, ttft_s, tpot_s)
        decision, self._state = decide(facts, self._policy, self._state)
        for role, load in loads.items():
            wanted = load.have if decision is None else decision.targets.get(role, load.have)
            self._metrics.set("workers_wanted", role, to=wanted)
        if decision is not None:
            self._carry_out(decision, loads)

    def _load(self, role: str, demand: Demand) -> RoleLoad:
        known = {worker.key.worker_id: worker for worker in self._registry}
        serving = [worker for worker in known.values() if worker.role.name == role and worker.takes_requests]
        expected = self._registry.expected.items()
        coming = sum(its_role == role and worker_id not in known for worker_id, its_role in expected)
        return role_load(serving, coming, demand.get(role, RoleDemand()), self._config.max_num_seqs)

    def _carry_out(self, decision: ScalingDecision, loads: dict[str, RoleLoad]) -> None:
        had = {role: loads[role].have for role in decision.reasons}
        event = ScalingEvent(time.time(), decision, had)
        self.log.publish(event)
        for role, reason in decision.reasons.items():
            wanted = decision.targets.get(role, had[role] + 1)
            logger.info("%s workers: %d instead of %d: %s", role, wanted, had[role], reason)
        if decision.changes_role is not None:
            self._metrics.count("scaling_decisions_total", decision.changes_role[1], "change")
            self._run_in_background(self._change_role(*decision.changes_role), event)
            return
        for role, wanted in decision.targets.items():
            direction = "up" if wanted > had[role] else "down"
            self._metrics.count("scaling_decisions_total", role, direction)
        self._run_in_background(self._scaler.scale(decision.targets), event)

    def _run_in_background(self, work: Coroutine[Any, Any, Any], event: ScalingEvent) -> None:
        task = asyncio.ensure_future(self._run(work, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, Any], event: ScalingEvent) -> None:
        try:
            await work
        except ApiError as error:
            self.log.publish(replace(event, failure=error.message))
            self._metrics.count("scaling_failures_total")
            logger.warning("the number of workers is not what was decided: %s", error.message)

    async def _change_role(self, giver: str, taker: str) -> None:
        able = [each for each in least_worth(self._registry) if each.takes_requests]
        worker = next((each for each in able if each.role.name == giver), None)
        if worker is None:
            raise ApiError(409, f"no {giver} worker is left to change its role")
        worker_id = worker.key.worker_id
        self._changes_role = True
        try:
            await (await self._drainer.change_role(worker_id, ROLES[taker]))
            lacking = await self._scaler.await_serving([worker_id], self._config.start_timeout)
        finally:
            self._changes_role = False
        if lacking:
            raise ApiError(503, f"worker {worker_id}: {lacking[worker_id]}, as a {taker} worker")
