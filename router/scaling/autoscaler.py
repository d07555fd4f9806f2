"""Decides periodically how many workers there should be, and carries that out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from protocol.roles import ROLES
from router.dispatch import Core
from router.dispatch.drainer import Drainer
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
from router.scaling.interface import ScalingEvent, ScalingLog
from router.scaling.scaler import Scaler, least_worth
from router.workers.demand import Demand, DemandMeter, RoleDemand, sum_of

logger = logging.getLogger(__name__)


class Autoscaler:
    """The autoscaler, on the event loop of one router at a time, which knows the others' demand.

    It scales by the same `Scaler` as operators. `room`: how many more workers of each role could be placed.
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
        """A worker is between two roles and counts for neither."""
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
        facts = ScalingFacts(
            now, loads, self.room, self._config.slo_ttft or inf, self._config.slo_tpot or inf
        )
        decision, self._state = decide(facts, self._policy, self._state)
        for role, load in loads.items():
            wanted = load.have if decision is None else decision.targets.get(role, load.have)
            self._metrics.workers_wanted(role, wanted)
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
        self.log.tell(event)
        for role, reason in decision.reasons.items():
            wanted = decision.targets.get(role, had[role] + 1)
            logger.info("%s workers: %d instead of %d: %s", role, wanted, had[role], reason)
        if decision.changes_role is not None:
            self._metrics.scaled(decision.changes_role[1], "change")
            self._run_in_background(self._change_role(*decision.changes_role), event)
            return
        for role, wanted in decision.targets.items():
            self._metrics.scaled(role, "up" if wanted > had[role] else "down")
        self._run_in_background(self._scaler.scale(decision.targets), event)

    def _run_in_background(self, work: Coroutine[Any, Any, Any], event: ScalingEvent) -> None:
        task = asyncio.ensure_future(self._run(work, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, Any], event: ScalingEvent) -> None:
        try:
            await work
        except ApiError as error:
            self.log.tell(replace(event, failure=error.message))
            self._metrics.scaling_failures.inc()
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
