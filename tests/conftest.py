"""Configures how test processes start and what their children inherit."""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiers import plugin

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from tests.schedule import ByModule

gc.disable()  # nothing collected so far is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    plugin.add_options(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModule:
    from tests.schedule import ByModule  # without pytest-xdist tests run one after the other

    return ByModule(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Give all pytest-xdist processes one fork server, which imports for ten seconds before it forks.

    While costs are recorded each process has its own, since its forks belong to one test.
    """
    node.workerinput.update(plugin.worker_input(node.config))
    if node.config.getoption("record_costs"):
        return
    forkserver.set_forkserver_preload(["tests.forked"])
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    node.workerinput["fork_server"] = server._forkserver_address


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    plugin.register(config)
    from_host: dict[str, Any] = getattr(config, "workerinput", {})
    if "fork_server" in from_host:
        server: Any = forkserver._forkserver
        server._forkserver_address = from_host["fork_server"]
        # it ends with the process that started it
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = lambda: None


def pytest_collection_finish() -> None:
    """Start the fork server once all modules are imported, since each may name modules to preload."""
    forkserver.set_forkserver_preload(["tests.forked"])
    gc.collect()
    gc.enable()
    gc.freeze()  # or each collection would traverse all tests and libraries, for a third of a second


@pytest.fixture
def no_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave silent workers their requests until they count as lost, also on a busy host."""
    monkeypatch.setattr("router.dispatch.races.SHARE", 0.0)
