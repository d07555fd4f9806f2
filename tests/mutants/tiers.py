"""The tests that judge mutants of some files in the fast tier, and those that the full tier adds.

Both tiers have thousands of tests, so only the modules nearest to the mutated files by imports take part,
until their cheap tests reach a bound of CPU time. The same bound holds for the expensive tests of each tier.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.mutants.judging import PYTEST
from tests.mutants.tree import environment
from tests.tiers import costs
from tests.tiers.canaries import CANARIES
from tests.tiers.choice import Situation, choose, nearest
from tests.tiers.reach import Imports


def tests_of_tiers(tree: Path, files: Collection[str], budget_cpu_s: float) -> dict[str, list[str]]:
    """Return the tests of the fast tier, as if these files were the change, and the full one's others."""
    known, distances = costs.load(tree), Imports(tree).distances(files)
    tests = _collected(tree, nearest(distances, known, budget_cpu_s))
    chosen = choose(tests, known, Situation(list(CANARIES.values()), distances)).chosen

    def bounded(tests: Sequence[str]) -> list[str]:
        """Return the cheap tests, then the nearest and cheapest expensive ones, up to the bound."""
        expensive = {test: cost.cpu_s for test in tests if (cost := known.of(test))}
        found, left_s = [test for test in tests if test not in expensive], budget_cpu_s
        for test in sorted(expensive, key=lambda test: (distances[costs.split(test)[0]], expensive[test])):
            left_s -= expensive[test]
            found += [test] if left_s >= 0 else []
        return found

    tiers = {
        "fast": bounded([test for test in tests if test in chosen]),
        "full": bounded([test for test in tests if test not in chosen]),
    }
    return {tier: found for tier, found in tiers.items() if found}


def _collected(tree: Path, paths: Sequence[str]) -> list[str]:
    command = [*PYTEST, "-v", "--collect-only", "--continue-on-collection-errors", *paths]
    done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if not tests:
        raise RuntimeError(f"pytest collects no test:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return tests
