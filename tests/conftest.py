"""Which tests may run beside which, and what the processes have that they fork."""

from __future__ import annotations

import multiprocessing

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

STARTS_RAY = (
    "tests/deploy/test_serve.py",
    "tests/e2e/test_object_store_serving.py",
    "tests/kvtransfer/test_object_store.py",
)
"""One after the other: Rays that start at the same moment may choose the same ports."""

FIRST = (
    "tests/cluster/test_ray_up.py",
    "ray",
    "tests/e2e/test_failover.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_drain.py",
    "tests/statistics/test_rejection_sampling.py",
    "tests/faults/test_schedules.py",
    "tests/faults/test_freezes.py",
    "tests/faults/test_networks.py",
    "tests/e2e/test_token_equality.py",
)
"""What takes longest begins first, so that it does not end last and alone."""


class ByModule(LoadScopeScheduling):
    """A module's tests share its servers, so one process has them all.

    The mark `xdist_group` does not do: pytest-xdist 3.8 passes groups on in a way that pytest 9.2 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return "ray" if module in STARTS_RAY else module

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting = [scope for scope in FIRST if scope in self.workqueue]
        if waiting:
            self.workqueue.move_to_end(waiting[0], last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModule:
    return ByModule(config, log)


def pytest_collection_finish() -> None:
    """Once all modules are imported, of which one may name what it needs alone: there is one fork server."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.forked"])
