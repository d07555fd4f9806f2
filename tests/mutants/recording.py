"""Pytest plugins for forked processes: one records the lines of tests, one reports the first failure."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
from _pytest.main import pytest_runtestloop

from tests.mutants.children import Say
from tests.mutants.trace import Trace


class Recorder:
    """Reports after each test the lines that it ran, as one line of JSON."""

    def __init__(self, say: Say, trace: Trace) -> None:
        self._say = say
        self._trace = trace

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._trace.take()
        try:
            return (yield)
        finally:
            lines, starts = self._trace.take()
            self._say(json.dumps({"shared": lines, "starts": starts}))
            self._trace.put(*before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._passed, self._seconds = False, 0.0
        self._trace.take()
        result = yield
        lines, starts = self._trace.take()
        ran = {"seconds": round(self._seconds, 3), "passed": self._passed, "starts": starts, "lines": lines}
        self._say(json.dumps({"test": item.nodeid, "ran": ran}))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.when == "call":
            self._passed = report.passed
        elif report.failed:
            self._passed = False


class FirstFailure:
    """Reports each test's name as it begins, to identify one that hangs, and whether it failed."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not hasattr(report, "wasxfail"):
            self._say(FAILED)


FAILED = "FAILED"


def run(session: pytest.Session, items: list[pytest.Item], plugin: object) -> None:
    session.config.pluginmanager.register(plugin)
    session.items = items
    session.testscollected = len(items)
    session.testsfailed = 0
    with suppress(pytest.Session.Failed, pytest.Session.Interrupted):
        pytest_runtestloop(session)
    session._setupstate.teardown_exact(None)
