"""Configures how test processes start and what their children inherit."""

from __future__ import annotations

import gc
from multiprocessing import forkserver

import pytest

from tests.tiers import plugin

gc.disable()  # nothing collected so far is garbage


pytest_addoption = plugin.add_options


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins. If several processes run tests, they share one fork server, which imports while
    tests are collected.

    While costs are recorded each process has its own, since its forks belong to one test.
    """
    plugin.register(config)
    if config.getoption("processes") and not config.getoption("record_costs"):
        forkserver.set_forkserver_preload(["tests.forked"])
        forkserver.ensure_running()


def pytest_collection_finish() -> None:
    """Start the fork server once all modules are imported, since each may name modules to preload."""
    forkserver.set_forkserver_preload(["tests.forked"])
    gc.collect()
    gc.enable()
    gc.freeze()  # or each collection would traverse all tests and libraries, for a third of a second
