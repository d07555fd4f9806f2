"""A pytest plugin that judges mutants in forks of one process, which has collected the tests once.

First each module's tests run without a mutant in a fork, which records the lines that they run. Then each
mutant gets a fork whose functions have the mutated code, and which runs the tests that reach the mutant.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.main import pytest_runtestloop

from tests.mutants.children import Say, adopt_orphans, end_children, in_child
from tests.mutants.operators import Mutant
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


_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.system")


class Trace:
    def __init__(self, root: Path, files: Collection[str]) -> None:
        self._lines: dict[str, set[int]] = {str(root / file): set() for file in files}
        self._files = dict(zip(self._lines, files, strict=True))
        self._starts = False
        sys.addaudithook(self._audit)
        self._watch_processes()

    def begin(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def end(self) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def take(self) -> tuple[dict[str, list[int]], bool]:
        """Return the lines that ran since the last call, and whether processes were started."""
        lines = {self._files[path]: sorted(found) for path, found in self._lines.items() if found}
        started = self._starts
        for found in self._lines.values():
            found.clear()
        self._starts = False
        return lines, started

    def put(self, lines: dict[str, list[int]], started: bool) -> None:
        """Put recorded lines back."""
        for path, file in self._files.items():
            self._lines[path].update(lines.get(file, ()))
        self._starts |= started

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        lines = self._lines.get(frame.f_code.co_filename)
        if lines is None:
            return None
        lines.add(frame.f_lineno)

        def step(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            lines.add(frame.f_lineno)
            return step

        return step

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            self._starts = True

    def _watch_processes(self) -> None:
        """Watch `multiprocessing` as well, since no audit event reports its processes."""
        start = BaseProcess.start

        def noticed(process: BaseProcess) -> None:
            self._starts = True
            start(process)

        BaseProcess.start = noticed


Place = tuple[str, int]


def functions_of(files: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Return the living functions of each of these files, named by their full paths."""
    found: dict[str, list[FunctionType]] = {file: [] for file in files}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in found:
            found[each.__code__.co_filename].append(each)
    return found


def replace(functions: Iterable[FunctionType], old: bytes, new: bytes, file: str) -> int:
    """Give the mutated code to the functions whose code differs between two texts of their file. Return their
    number.
    """
    before, after = (dict(_codes(compile(text, file, "exec", dont_inherit=True))) for text in (old, new))
    changed = {place: code for place, code in after.items() if before.get(place) != code}
    count = 0
    for function in functions:
        code = changed.get(_place(function.__code__))
        if code and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code
            count += 1
    return count


def _codes(code: CodeType) -> Iterator[tuple[Place, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield _place(each), each
            yield from _codes(each)


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno
