"""How processes of tests start, and what those have that they fork."""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import pytest

from tests.tiers import plugin

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from tests.schedule import ByModule

gc.disable()  # until all is collected: nothing of it is garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    plugin.add_options(parser)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModule:
    from tests.schedule import ByModule  # without pytest-xdist tests run one after the other

    return ByModule(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """All processes of pytest-xdist have one fork server: it imports for ten seconds before it forks.

    Each has its own where costs are recorded: what it forks belongs to one test.
    """
    node.workerinput.update(plugin.worker_input(node.config))
    if node.config.getoption("record_costs"):
        return
    forkserver.set_forkserver_preload(["tests.forked"])
    forkserver.ensure_running()
    node.workerinput["fork_server"] = forkserver._forkserver._forkserver_address


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    plugin.register(config)
    if "fork_server" in getattr(config, "workerinput", {}):
        server = forkserver._forkserver
        server._forkserver_address = config.workerinput["fork_server"]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # it ends with who has started it
        server.ensure_running = lambda: None


def pytest_collection_finish() -> None:
    """Once all modules are imported, of which one may name what it needs alone: there is one fork server."""
    forkserver.set_forkserver_preload(["tests.forked"])
    gc.collect()
    gc.enable()
    gc.freeze()  # or each collection would go through all tests and libraries, for a third of a second
