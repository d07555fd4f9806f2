"""Records what each test costs: CPU time of its process and of all that it starts."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.costs import Cost

PROPERTY = "cost"
"""The property of a test's report that holds its costs."""


@dataclass
class Row:
    """A test's costs. The costs of fixtures that other tests share are kept apart."""

    test: str
    cpu_s: float = 0.0
    wall_s: float = 0.0
    made: dict[str, tuple[float, float]] = field(default_factory=dict)
    """CPU and wall seconds of each shared fixture that was set up for this test."""
    uses: list[str] = field(default_factory=list)
    """The shared fixtures that the test uses."""


class Recorder:
    """Measures in the process that runs the tests. Each report of a test's end carries its costs."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._row = Row("")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self) -> Generator[None, object, object]:
        result = yield
        first = get_context("forkserver").Process(target=int)
        first.start()
        first.join()  # wait for the fork server's imports, which no test should pay for
        self._ledger.read()
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._row = Row(item.nodeid, uses=sorted(_shared_fixtures(item)))
        with self._measured():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        with self._measured():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            with self._measured():
                return (yield)
        finally:
            item.user_properties.append((PROPERTY, vars(self._row)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        row, inner = self._row, Row("")
        self._row = inner  # a shared fixture's own shared fixtures are charged apart, too
        try:
            with self._measured():
                return (yield)
        finally:
            self._row = row
            row.made |= inner.made
            row.made[_key(fixturedef, getattr(request, "param_index", 0))] = inner.cpu_s, inner.wall_s
            row.cpu_s -= inner.cpu_s + sum(cpu_s for cpu_s, _ in inner.made.values())
            row.wall_s -= inner.wall_s + sum(wall_s for _, wall_s in inner.made.values())

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Add the block's costs to the row."""
        row, cpu_s, wall_s = self._row, self._ledger.read(), time.monotonic()
        try:
            yield
        finally:
            row.wall_s += time.monotonic() - wall_s
            row.cpu_s += self._ledger.read() - cpu_s


def _shared_fixtures(item: pytest.Item) -> Iterator[str]:
    info = getattr(item, "_fixtureinfo", None)
    indices = item.callspec.indices if hasattr(item, "callspec") else {}
    for name, found in (info.name2fixturedefs if info else {}).items():
        if found and found[-1].scope != "function":
            yield _key(found[-1], indices.get(name, 0))


def _key(fixture: pytest.FixtureDef[Any], parameter: int) -> str:
    return f"{fixture.baseid}::{fixture.argname}[{parameter}]"


def shared_out(rows: Iterable[Mapping[str, Any]]) -> dict[str, Cost]:
    """Return each test's costs with an equal share of the shared fixtures that it uses."""
    known = [Row(**row) for row in rows]
    users = Counter(fixture for row in known for fixture in {*row.uses, *row.made})
    cpu_s, wall_s = Counter[str](), Counter[str]()
    for row in known:
        for fixture, (cpu, wall) in row.made.items():
            cpu_s[fixture] += cpu / users[fixture]
            wall_s[fixture] += wall / users[fixture]
    return {
        row.test: Cost(
            row.cpu_s + sum(cpu_s[fixture] for fixture in {*row.uses, *row.made}),
            row.wall_s + sum(wall_s[fixture] for fixture in {*row.uses, *row.made}),
        )
        for row in known
    }


TAG = "TEST_LEDGER"
"""The environment variable that started processes inherit. It identifies daemons, whose parent is init."""

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Ledger:
    """Sums the CPU times of running processes from /proc, with those of the children that they waited for.
    What a process spends between the last reading and its end counts only if its parent waits for it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._label = f"{TAG}={self._pid}.{time.time_ns()}"
        os.environ[TAG] = self._label.partition("=")[2]
        self._ours: dict[int, tuple[bytes, bool]] = {}
        """Each known process's start, and whether it is ours."""
        self._left_out_s = self._lost_s = self._total_s = 0.0
        self.read()

    def read(self) -> float:
        """Return the CPU seconds spent so far."""
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        spent_s = sum(usage.ru_utime + usage.ru_stime for usage in usages) + self._others_s()
        total_s = spent_s - self._left_out_s + self._lost_s
        self._lost_s += max(0.0, self._total_s - total_s)  # a process ended, and nobody waited for it
        self._total_s = max(self._total_s, total_s)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._left_out_s += after.ru_utime + after.ru_stime - usages[0].ru_utime - usages[0].ru_stime
        return self._total_s

    def _others_s(self) -> float:
        """Return the time of all our other processes that run, and of the children that they waited for."""
        before, self._ours = self._ours, {}
        ticks = 0
        for name in os.listdir(_PROC):
            if not name.isdigit() or int(name) == self._pid:
                continue
            try:
                fields = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue  # it has just ended
            pid, parent, started = int(name), int(fields[1]), fields[19]
            known = before.get(pid)
            is_ours = known[1] if known and known[0] == started else self._is_ours(pid, parent)
            self._ours[pid] = started, is_ours
            ticks += sum(map(int, fields[11:15])) if is_ours else 0
        return ticks / _TICKS

    def _is_ours(self, pid: int, parent: int) -> bool:
        if parent == self._pid or self._ours.get(parent, (b"", False))[1]:
            return True
        try:
            return self._label.encode() in (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            return False
