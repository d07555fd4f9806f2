"""Judges mutants in memory where that suffices, else in a process that imports the changed file."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.mutants.children import changed, end_children, environment
from tests.mutants.inside import JOB, Job
from tests.mutants.operators import Mutant
from tests.mutants.verdicts import Module, Verdict
from tests.tiers.reach import Imports

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.quick")
IMPORTS_S = 60.0
"""The time limit for a process's imports before its tests begin."""
SLOWER = 3
_FINE = (0, 1, 5)
"""Exit codes without a failure: 1 without a failed test means skips without a reason, 5 means no tests."""
_NO_TEST = "exit status"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?|\S+)(?: - .*)?$", re.MULTILINE)


class Judging:
    """Judges mutants in a private tree."""

    def __init__(self, tree: Path, folder: Path, tests: Sequence[str], timeout_s: float) -> None:
        self._tree = tree
        self._folder = folder
        self._tests = tests
        self._timeout_s = timeout_s
        self._imports = Imports(tree)
        self._sound: dict[str, bool] = {}
        self._age = int(time.time()) - 10**8

    def judge(self, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
        """Yield a verdict about each mutant: first those killed in memory, then the others."""
        left = []
        answers = self._in_memory(mutants)
        modules: dict[str, Module] = next(answers)
        for mutant, verdict in zip(mutants, answers, strict=True):
            if verdict.killed_by:
                yield verdict
            else:
                left.append((mutant, verdict))
        for mutant, verdict in left:
            yield self._from_file(mutant, verdict, modules)

    def _in_memory(self, mutants: Sequence[Mutant]) -> Iterator[Any]:
        """Yield the modules with the lines that their tests run, then a verdict about each mutant."""
        reading, writing = os.pipe()
        files = sorted({mutant.file for mutant in mutants})
        job, log = self._folder / "job.pickle", self._folder / "judge.log"
        job.write_bytes(pickle.dumps(Job(files, list(mutants), self._timeout_s, writing)))
        command = [*PYTEST, "-p", "tests.mutants.inside", "--continue-on-collection-errors"]
        with log.open("w") as output, open(reading, "rb") as answers:
            process = subprocess.Popen(
                [*command, self._listed(self._tests)],
                cwd=self._tree,
                env={**environment(self._tree), JOB: str(job)},
                pass_fds=[writing],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            os.close(writing)
            try:
                for _ in range(1 + len(mutants)):
                    yield pickle.load(answers)
            except EOFError:
                raise RuntimeError(f"pytest did not judge all mutants:\n{log.read_text()[-3000:]}") from None
            process.wait()

    def _from_file(self, mutant: Mutant, verdict: Verdict, modules: dict[str, Module]) -> Verdict:
        """Run in a new process the tests that a mutant in memory does not reach: those that start processes,
        or all.
        """
        distances = self._imports.distances([mutant.file])
        tests: dict[str, float] = {}
        for path in sorted(distances.keys() & modules.keys(), key=lambda path: (distances[path], path)):
            module = modules[path]
            names = module.starting() if verdict.in_place else module.passing()
            tests |= {name: module.tests[name].seconds for name in names if self._sound.get(name, True)}
        if not tests:
            return verdict
        limit_s = IMPORTS_S + self._timeout_s + SLOWER * sum(tests.values())
        file = self._tree / mutant.file
        self._age += 1
        began = time.monotonic()
        with changed(file, mutant.applied(file.read_bytes()), self._age):
            killed_by = self._first_failure(list(tests), limit_s)
        seconds = round(verdict.seconds + time.monotonic() - began, 2)
        if killed_by and not self._is_sound(killed_by, limit_s):
            return self._from_file(mutant, replace(verdict, seconds=seconds), modules)
        return replace(verdict, killed_by=killed_by, ran=verdict.ran + len(tests), seconds=seconds)

    def _is_sound(self, test: str, limit_s: float) -> bool:
        """Tell whether a test passes without a mutant. Otherwise it judges no more."""
        if test not in self._sound:
            self._sound[test] = test.startswith(_NO_TEST) or not self._first_failure([test], limit_s)
        return self._sound[test]

    def _first_failure(self, tests: Sequence[str], limit_s: float) -> str:
        """Return the test that fails first, or the reason why the run ended early."""
        with subprocess.Popen(
            [*PYTEST, "-x", self._listed(tests)],
            cwd=self._tree,
            env=environment(self._tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                output = ""
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        end_children()
        found = _FAILED.search(output)
        if found:
            return found[1]
        return "" if process.returncode in _FINE else f"{_NO_TEST} {process.returncode}"

    def _listed(self, tests: Sequence[str]) -> str:
        """Return pytest's argument for these tests, which may be too many for a command line."""
        listed = self._folder / "tests.txt"
        listed.write_text("\n".join(tests))
        return f"@{listed}"
