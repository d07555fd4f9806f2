"""Runs tests in several processes, which are forks of the one that has collected the tests.

A fork has all imports and the collected tests, which take a process of its own half a minute of CPU time.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from warnings import WarningMessage

import pytest

from tests.tiers import costs
from tests.tiers.costs import Cost, Costs

STARTS_RAY = (
    "tests/deploy/test_operations.py",
    "tests/deploy/test_serve.py",
    "tests/e2e/test_object_store_serving.py",
    "tests/examples/test_examples.py",
    "tests/kvtransfer/test_object_store.py",
)
"""Modules that run one after the other, since Rays that start at the same moment may choose the
same ports.
"""

WAITING = 3
"""A module counts as mostly waiting if its tests take this many times their CPU time."""
END_S = 30.0
"""The time that processes have to end their fixtures when the run is interrupted."""


class Queue:
    """The tests that no process has taken. A process takes a whole module, since its tests share servers.

    The longest modules begin first, or one would end last and alone. The first process begins with modules
    that mostly wait and the others end with them, so the cores are neither idle nor overloaded.
    """

    def __init__(self, tests: Sequence[str], known: Costs) -> None:
        self._groups: dict[str, list[int]] = {}
        for index, test in enumerate(tests):
            module = costs.split(test)[0]
            self._groups.setdefault("ray" if module in STARTS_RAY else module, []).append(index)
        self._estimates = {
            group: known.estimate(tests[index] for index in indices)
            for group, indices in self._groups.items()
        }

    def take(self, begins_waiting: bool) -> list[int]:
        """Return the indices of the next tests, or none at the end."""
        if not self._groups:
            return []
        group = max(self._groups, key=lambda group: _rank(self._estimates[group], begins_waiting))
        return self._groups.pop(group)


def _rank(cost: Cost, begins_waiting: bool) -> tuple[bool, float]:
    return (cost.wall_s > WAITING * cost.cpu_s) == begins_waiting, cost.wall_s


@dataclass
class Fork:
    """A process that runs tests, as its parent sees it."""

    number: int
    process: BaseProcess
    connection: Connection
    tests: deque[int]
    """The tests that it has and has not begun."""
    running: int | None = None


class Processes:
    """The plugin that distributes tests."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self._config = config
        self._count = count
        self._forks: list[Fork] = []
        # Asking CUDA itself for devices would break it in forks.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or self._config.option.collectonly:
            return None
        self._session = session
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        self._queue = Queue([item.nodeid for item in session.items], costs.load(self._config.rootpath))
        try:
            for number in range(self._count):
                self._fork(number, self._queue.take(begins_waiting=number == 0))
            while self._forks:
                self._listen()
        finally:
            self._end()
        return True

    def _fork(self, number: int, tests: Sequence[int]) -> None:
        if not tests:
            return
        ours, theirs = get_context("fork").Pipe()
        inherited = [ours, *(fork.connection for fork in self._forks)]
        arguments = (self._session, tests, number, theirs, inherited)
        process = get_context("fork").Process(target=_run, args=arguments)
        process.start()
        theirs.close()
        self._forks.append(Fork(number, process, ours, deque(tests)))

    def _listen(self) -> None:
        for ready in wait([fork.connection for fork in self._forks]):
            fork = next(fork for fork in self._forks if fork.connection is ready)
            try:
                hook, facts = fork.connection.recv()
            except (EOFError, OSError):
                self._ended(fork)
                continue
            self._hear(fork, hook, facts)

    def _hear(self, fork: Fork, hook: str, facts: dict[str, Any]) -> None:
        if hook == "take":
            taken = self._queue.take(begins_waiting=fork.number == 0)
            fork.tests.extend(taken)
            fork.connection.send(taken)
        elif hook == "pytest_runtest_logstart":
            fork.running = fork.tests.popleft()
            self._config.hook.pytest_runtest_logstart(**facts)
        elif hook == "pytest_runtest_logfinish":
            fork.running = None
            self._config.hook.pytest_runtest_logfinish(**facts)
        elif hook == "pytest_runtest_logreport":
            self._report(self._config.hook.pytest_report_from_serializable(config=self._config, **facts))
        else:
            facts["warning_message"] = WarningMessage(*facts["warning_message"])
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=facts)

    def _report(self, report: pytest.TestReport) -> None:
        self._config.hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _ended(self, fork: Fork) -> None:
        """If a test has ended its process, report that and fork another one for the tests after it."""
        self._forks.remove(fork)
        fork.process.join()
        code = fork.process.exitcode
        if fork.running is not None:
            item = self._session.items[fork.running]
            reason = f"the test ended its process, with exit code {code}"
            self._fork(fork.number, fork.tests or self._queue.take(begins_waiting=fork.number == 0))
            self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call"))
        elif code or fork.tests:
            raise ChildProcessError(f"a process ended between two tests, with exit code {code}")

    def _end(self) -> None:
        for fork in self._forks:
            os.kill(fork.process.ident or 0, signal.SIGINT)
        for fork in self._forks:
            fork.process.join(END_S)
            fork.process.kill()


class Teller:
    """The plugin that tells the parent what happens in a fork."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("pytest_runtest_logreport", data=data)

    def pytest_warning_recorded(self, warning_message: WarningMessage, when: str, nodeid: str) -> None:
        if when == "runtest":  # the parent knows those of the collection
            known = warning_message
            fields = (str(known.message), known.category, known.filename, known.lineno)
            self._tell(
                "pytest_warning_recorded", warning_message=fields, when=when, nodeid=nodeid, location=None
            )

    def take(self) -> list[int]:
        self._tell("take")
        return list(self._connection.recv())

    def _tell(self, hook: str, **facts: object) -> None:
        self._connection.send((hook, facts))


def _run(
    session: pytest.Session,
    tests: Sequence[int],
    number: int,
    connection: Connection,
    others: list[Connection],
) -> None:
    """Run these tests in a fork, and then what the parent has for it."""
    for other in others:
        other.close()  # or nobody would notice the parent's end
    config = session.config
    reporter = config.pluginmanager.unregister(name="terminalreporter")
    assert isinstance(reporter, pytest.TerminalReporter)
    config.pluginmanager.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # for pytest-timeout
    teller = Teller(config, connection)
    config.pluginmanager.register(teller)
    config.pluginmanager.getplugin("capturemanager").start_global_capturing()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"fork{number}-")
    if forkserver._forkserver._forkserver_pid:  # only its parent, which has started it, can wait for it
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    try:
        for index, following in _with_following(tests, teller):
            item, nextitem = session.items[index], None if following is None else session.items[following]
            config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    finally:
        session._setupstate.teardown_exact(None)
    os._exit(0)  # threads that a test has left may not end


def _with_following(tests: Sequence[int], teller: Teller) -> Iterator[tuple[int, int | None]]:
    """Yield each test with the next one, which decides what fixtures end. So a module is taken before
    the last test of the one before begins.
    """
    waiting = deque(tests)
    while waiting:
        index = waiting.popleft()
        if not waiting:
            waiting.extend(teller.take())
        yield index, waiting[0] if waiting else None
