"""A pytest plugin that judges mutants in forks of one process, which has collected the tests once.

First each module's tests run without a mutant in a fork, which records the lines that they run. Then each
mutant gets a fork whose functions have the mutated code, and which runs the tests that reach the mutant.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.main import pytest_runtestloop

from tests.mutants.children import Say, adopt_orphans, end_children, in_child
from tests.mutants.living import functions_of, replace
from tests.mutants.operators import Mutant
from tests.mutants.trace import Trace
from tests.mutants.verdicts import Baseline, Module, Verdict, hits

JOB = "TANDEM_MUTANTS"
"""The environment variable that names the job's file."""
SLOWER = 5
"""A test with a mutant may take this many times its recorded time, plus the timeout."""
SILENT_S = 300.0
"""The time limit of each test while it is recorded."""
FAILED, UNSEEN = "FAILED", "UNSEEN"
"""A fork says these besides tests' names: a test has failed, or no living function has the mutant."""


@dataclass(frozen=True)
class Job:
    """The mutants of some files. The modules, then the verdicts, are pickled into the pipe `answers`."""

    files: list[str]
    mutants: list[Mutant]
    timeout_s: float
    answers: int


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(config.rootpath))


class Judge:
    def __init__(self, root: Path) -> None:
        self._job: Job = pickle.loads(Path(os.environ.pop(JOB)).read_bytes())
        self._root = root
        self._trace = Trace(root, self._job.files)
        self._trace.begin()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._trace.end()
        self._imports = self._trace.take()[0]
        adopt_orphans()
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        with open(self._job.answers, "wb", buffering=0) as answers:
            modules = self._modules()
            pickle.dump(modules, answers)
            gc.unfreeze()  # frozen objects would not be found
            self._functions = functions_of(str(self._root / file) for file in self._job.files)
            gc.freeze()
            for mutant in self._job.mutants:
                pickle.dump(self._judge(mutant, modules), answers)
        return True

    def _modules(self) -> dict[str, Module]:
        by_path: dict[str, list[pytest.Item]] = {}
        for item in self._session.items:
            by_path.setdefault(item.nodeid.partition("::")[0], []).append(item)
        return {path: self._record(items) for path, items in by_path.items()}

    def _record(self, items: list[pytest.Item]) -> Module:
        def work(say: Say) -> None:
            self._trace.begin()
            self._run(items, Recorder(say, self._trace))

        lines, _ = in_child(work, SILENT_S)
        end_children()
        module = Module()
        for row in map(json.loads, lines):
            if "test" in row:
                module.tests[row["test"]] = Baseline(**row["ran"])
                continue
            module.starts |= row["starts"]
            for file, numbers in row["shared"].items():
                module.shared[file] = sorted({*module.shared.get(file, ()), *numbers})
        return module

    def _judge(self, mutant: Mutant, modules: dict[str, Module]) -> Verdict:
        if not mutant.scope:
            return Verdict(mutant.key, in_place=False)
        costs = {
            test: module.tests[test].seconds
            for module in modules.values()
            for test in module.reaching(mutant)
        }
        tests = sorted(costs, key=costs.__getitem__)
        began = time.monotonic()
        limit_s = self._job.timeout_s + SLOWER * max(costs.values(), default=0)
        said, well = in_child(lambda say: self._try(mutant, tests, say), limit_s) if tests else ([], True)
        end_children()
        names = [line for line in said if line in self._items]
        killed_by = names[-1] if names and (FAILED in said or not well) else ""
        in_place = UNSEEN not in said and not hits(self._imports, mutant)
        return Verdict(mutant.key, killed_by, len(names), round(time.monotonic() - began, 2), in_place)

    def _try(self, mutant: Mutant, tests: list[str], say: Say) -> None:
        file = str(self._root / mutant.file)
        source = Path(file).read_bytes()
        if not replace(self._functions[file], source, mutant.applied(source), file):
            say(UNSEEN)
            return
        self._session.config.option.maxfail = 1
        self._run([self._items[test] for test in tests], FirstFailure(say))

    def _run(self, items: list[pytest.Item], plugin: object) -> None:
        session = self._session
        session.config.pluginmanager.register(plugin)
        session.items, session.testscollected, session.testsfailed = items, len(items), 0
        with suppress(pytest.Session.Failed, pytest.Session.Interrupted):
            pytest_runtestloop(session)
        session._setupstate.teardown_exact(None)


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
        self._passed = report.passed if report.when == "call" else self._passed and not report.failed


class FirstFailure:
    """Reports each test's name as it begins, to identify one that hangs, and whether it failed."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not hasattr(report, "wasxfail"):
            self._say(FAILED)
