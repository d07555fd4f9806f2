"""Judges mutants by the fast tier's tests, and survivors by the rest of the full tier.

Both tiers have thousands of tests, so only the modules nearest to the mutated files by imports take part,
until their cheap tests reach a bound of CPU time. The same bound holds for the expensive tests of each tier.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.mutants.job import Verdict
from tests.mutants.judging import PYTEST, Judging
from tests.mutants.operators import Mutant
from tests.mutants.tree import environment
from tests.tiers import costs
from tests.tiers.canaries import CANARIES
from tests.tiers.choice import Situation, choose, nearest
from tests.tiers.reach import Imports

Say = Callable[[Verdict, str], None]


class Tiers:
    def __init__(self, tree: Path, budget_cpu_s: float, commit: int, timeout_s: float) -> None:
        self._tree = tree
        self._imports = Imports(tree)
        self._costs = costs.load(tree)
        self._budget_cpu_s = budget_cpu_s
        self._commit = commit
        self._timeout_s = timeout_s

    def judge(self, mutants: Sequence[Mutant], folder: Path, say: Say) -> None:
        """Report each mutant's verdict and the smallest tier that kills it: "fast" or "full"."""
        files = sorted({mutant.file for mutant in mutants})
        distances = self._imports.distances(files)
        tests = self._collected(nearest(distances, self._costs, self._budget_cpu_s))
        situation = Situation(list(CANARIES.values()), distances, commit=self._commit)
        chosen = choose(tests, self._costs, situation).chosen
        fast = self._bounded([test for test in tests if test in chosen], distances)
        rest = self._bounded([test for test in tests if test not in chosen], distances)
        survive: list[Mutant] = []
        by_key = {mutant.key: mutant for mutant in mutants}

        def say_fast(verdict: Verdict) -> None:
            if verdict.killed_by:
                say(verdict, "fast")
            else:
                survive.append(by_key[verdict.key])

        self._judge(mutants, files, folder / "fast", fast, say_fast)
        self._judge(survive, files, folder / "rest", rest, lambda verdict: say(verdict, "full"))

    def _judge(
        self,
        mutants: Sequence[Mutant],
        files: Sequence[str],
        folder: Path,
        tests: Sequence[str],
        say: Callable[[Verdict], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        listed = folder / "chosen.txt"
        listed.write_text("\n".join(tests))
        if not tests:
            for mutant in mutants:
                say(Verdict(mutant.key))
        elif mutants:
            Judging(self._tree, folder, [f"@{listed}"], self._timeout_s).judge(mutants, files, say)

    def _bounded(self, tests: Sequence[str], distances: Mapping[str, int]) -> list[str]:
        """Return the cheap tests, then the nearest and cheapest expensive ones, up to the bound."""
        expensive = {test: cost.cpu_s for test in tests if (cost := self._costs.of(test))}
        left_s = self._budget_cpu_s
        left_out = set()
        for test in sorted(
            expensive, key=lambda test: (distances[costs.split(test)[0]], expensive[test], test)
        ):
            left_s -= expensive[test]
            if left_s < 0:
                left_out.add(test)
        return [test for test in tests if test not in left_out]

    def _collected(self, paths: Sequence[str]) -> list[str]:
        command = [*PYTEST, "-v", "--collect-only", "--continue-on-collection-errors", *paths]
        done = subprocess.run(
            command, cwd=self._tree, env=environment(self._tree), capture_output=True, text=True
        )
        tests = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
        if not tests:
            raise RuntimeError(f"pytest collects no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return tests
