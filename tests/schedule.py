"""Decides which tests may run side by side."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.tiers import costs
from tests.tiers.costs import Cost

STARTS_RAY = (
    "tests/bench/test_bench_transfer.py",
    "tests/deploy/test_full_disks.py",
    "tests/deploy/test_operations.py",
    "tests/deploy/test_ray_cluster.py",
    "tests/deploy/test_serve.py",
    "tests/e2e/test_object_store_serving.py",
    "tests/e2e/test_random_kills.py",
    "tests/examples/test_examples.py",
    "tests/kvtransfer/test_object_store.py",
)
"""Modules that run one after the other, since Rays that start at the same moment may choose the
same ports.
"""

WAITING = 3
"""A module counts as mostly waiting if its tests take this many times their CPU time."""


class ByModule(LoadScopeScheduling):
    """Runs each module in one process, since its tests share servers.

    The longest modules begin first, or one would end last and alone. One process begins with modules that
    mostly wait and the others end with them, so the cores are neither idle nor overloaded.

    The mark `xdist_group` does not help: pytest-xdist 3.8 passes groups on in a way that pytest 9.2 ignores.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._costs = costs.load(config.rootpath)
        self._estimates: dict[str, Cost] = {}

    def _split_scope(self, nodeid: str) -> str:
        module = costs.split(nodeid)[0]
        return "ray" if module in STARTS_RAY else module

    def _assign_work_unit(self, node: WorkerController) -> None:
        begins_waiting = node.gateway.id == "gw0"
        first = max(self.workqueue, key=lambda scope: self._rank(self._estimate(scope), begins_waiting))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    @staticmethod
    def _rank(cost: Cost, begins_waiting: bool) -> tuple[bool, float]:
        return (cost.wall_s > WAITING * cost.cpu_s) == begins_waiting, cost.wall_s

    def _estimate(self, scope: str) -> Cost:
        if scope not in self._estimates:
            self._estimates[scope] = self._costs.estimate(self.workqueue[scope])
        return self._estimates[scope]
