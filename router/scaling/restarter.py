"""The rolling restart: each worker's process ends and starts again, one after the other, under load.

A worker that is alone in its role gets a successor with another name, which serves before the worker leaves.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from protocol.config import ServeConfig
from router.dispatch.drainer import Drainer, DrainReport
from router.errors import ApiError
from router.scaling.interface import Turns
from router.scaling.scaler import Scaler
from router.workers.registry import Registry, Worker

logger = logging.getLogger(__name__)


@dataclass
class RestartReport(DrainReport):
    """Adds the restarted workers, and the successors of workers that were alone in their role."""

    restarted: list[str] = field(default_factory=list)
    successors: list[str] = field(default_factory=list)


class Restarter:
    """Restarts workers. Runs on the event loop only: one restart at a time, and no scaling meanwhile."""

    def __init__(
        self, config: ServeConfig, registry: Registry, drainer: Drainer, scaler: Scaler, turns: Turns
    ) -> None:
        self._config = config
        self._registry = registry
        self._drainer = drainer
        self._scaler = scaler
        self._turns = turns

    async def restart(self) -> RestartReport:
        """Restart all current workers. Returns when each has been restarted or is gone.

        Raises `ApiError` 409 if nothing has changed, or 503 if a worker did not come back. The workers whose
        turn had not come keep running unchanged.
        """
        began, report = time.monotonic(), RestartReport()
        async with self._turns.hold("restart"):
            for worker in self._in_order():
                await self._restart(worker, report)
        report.seconds = time.monotonic() - began
        logger.info("restarted: %s", report)
        return report

    def _in_order(self) -> list[Worker]:
        """Return the live workers, first those whose successor may be refused: nothing has changed then."""
        workers = [worker for worker in self._registry if worker.live]
        return sorted(workers, key=lambda worker: (not self._is_alone(worker), worker.key.worker_id))

    def _is_alone(self, worker: Worker) -> bool:
        others = (other for other in self._registry if other is not worker and other.takes_requests)
        return all(other.role != worker.role for other in others)

    async def _restart(self, worker: Worker, report: RestartReport) -> None:
        worker_id = worker.key.worker_id
        if self._registry.current_of(worker_id) is not worker or worker.draining:
            return  # it died and is new already, or it leaves
        if self._is_alone(worker):
            scaled = await self._scaler.resize({worker.role.name: 2})
            report.successors += scaled.started
            drained = await (await self._drainer.drain(worker_id))
        else:
            drained = await (await self._drainer.restart(worker_id))
            lacking = await self._scaler.await_serving([worker_id], self._config.start_timeout)
            if lacking:
                done = ", ".join(report.restarted) or "none"
                reason = f"worker {worker_id} did not come back: {lacking[worker_id]}"
                raise ApiError(503, f"{reason}; restarted before it: {done}", code="no_worker")
        report.add(drained)
        report.restarted.append(worker_id)
