"""Records the CPU time, including started processes, and the wall time of each test."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import pytest

from tests.tiers.costs import Cost
from tests.tiers.ledger import Ledger

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
