"""Which tests may run beside which, when pytest-xdist shares them among processes."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

MACHINE_WIDE = ("tests/deploy", "tests/faults", "tests/kvtransfer", "tests/e2e/test_object_store_serving.py")
"""They look at what is left on the machine, in /dev/shm and elsewhere: one after the other."""


class ByModule(LoadScopeScheduling):
    """A module's tests share its servers, so one process has them all.

    The mark `xdist_group` does not do: pytest-xdist 3.8 passes groups on in a way that pytest 9.2 ignores.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "machine" if nodeid.startswith(MACHINE_WIDE) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModule:
    return ByModule(config, log)
