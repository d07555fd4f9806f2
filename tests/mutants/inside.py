"""A pytest plugin that judges mutants in forks of one process, which has collected the tests once.

First each module's tests run without a mutant in a fork, which records the lines that they run. Then each
mutant gets a fork whose functions have the mutated code, and which runs the tests that reach the mutant.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest

from tests.mutants.children import Say, adopt_orphans, end_children, in_child
from tests.mutants.job import JOB, Baseline, Job, Module, Verdict, hits, rows_of
from tests.mutants.living import functions_of, replace
from tests.mutants.operators import Mutant
from tests.mutants.recording import FAILED, FirstFailure, Recorder, run
from tests.mutants.trace import Trace

SLOWER = 5
"""A test with a mutant may take this many times its recorded time, plus the timeout."""
SILENT_S = 300.0
"""The time limit of each test while it is recorded."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Judge(config))


class Judge:
    def __init__(self, config: pytest.Config) -> None:
        self._job = Job.load(Path(os.environ.pop(JOB)))
        self._root = config.rootpath
        self._trace = Trace(self._root, self._job.files)
        self._trace.begin()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._trace.end()
        self._imports = self._trace.take()[0]
        adopt_orphans()
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        modules = self._modules()
        gc.unfreeze()  # frozen objects would not be found
        self._functions = functions_of(str(self._root / file) for file in self._job.files)
        gc.freeze()
        for mutant in self._job.mutants:
            self._job.say(self._judge(mutant, modules))
        return True

    def _modules(self) -> list[Module]:
        """Return the recordings of the collected modules, after recording the missing ones."""
        known = self._job.recorded()
        found = []
        by_path: dict[str, list[pytest.Item]] = {}
        for item in self._session.items:
            by_path.setdefault(item.nodeid.partition("::")[0], []).append(item)
        for path, items in by_path.items():
            if path not in known:
                known[path] = self._record(items)
                self._job.record(path, known[path])
            found.append(known[path])
        return found

    def _record(self, items: list[pytest.Item]) -> Module:
        def work(say: Say) -> None:
            self._trace.begin()
            run(self._session, items, Recorder(say, self._trace))

        lines, _ = in_child(work, SILENT_S)
        end_children()
        module = Module()
        for row in rows_of(lines):
            if "test" in row:
                module.tests[row["test"]] = Baseline(**row["ran"])
                continue
            module.starts |= row["starts"]
            for file, numbers in row["shared"].items():
                module.shared[file] = sorted({*module.shared.get(file, ()), *numbers})
        return module

    def _judge(self, mutant: Mutant, modules: list[Module]) -> Verdict:
        if not mutant.scope:
            return Verdict(mutant.key, in_place=False)
        costs: dict[str, float] = {}
        for module in modules:
            names = [test for test in module.reaching(mutant) if test in self._items]
            costs |= {test: module.tests[test].seconds for test in names}
        tests = sorted(costs, key=costs.__getitem__)
        began = time.monotonic()
        limit_s = self._job.timeout_s + SLOWER * max(costs.values(), default=0)
        said, well = in_child(lambda say: self._run(mutant, tests, say), limit_s) if tests else ([], True)
        end_children()
        names = [line for line in said if line in self._items]
        killed_by = names[-1] if names and (FAILED in said or not well) else ""
        in_place = UNSEEN not in said and not hits(self._imports, mutant)
        return Verdict(mutant.key, killed_by, len(names), round(time.monotonic() - began, 2), in_place)

    def _run(self, mutant: Mutant, tests: list[str], say: Say) -> None:
        file = str(self._root / mutant.file)
        source = Path(file).read_bytes()
        if not replace(self._functions[file], source, mutant.applied(source), file):
            say(UNSEEN)
            return
        self._session.config.option.maxfail = 1
        run(self._session, [self._items[test] for test in tests], FirstFailure(say))


UNSEEN = "UNSEEN"
"""The verdict when no living function has the mutant."""
