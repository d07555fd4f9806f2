"""Tells how many small faults of some files the tests find: see docs/testing.md."""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.children import adopt_orphans, end_children, environment, private_copy
from tests.mutants.judging import PYTEST, Judging
from tests.mutants.operators import Mutant, mutants_of
from tests.tiers import costs
from tests.tiers.canaries import CANARIES
from tests.tiers.choice import Situation, choose, nearest
from tests.tiers.reach import Imports

ROOT = Path(__file__).parents[2]
_DEVICE = "import triton"
"""Files with Triton kernels run without a GPU only in Triton's interpreter."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    try:
        if options.compare:
            return _compare(options)
        files = files_of(options.files)
        if not files:
            sys.exit(f"--files names no Python file: {' '.join(options.files)}")
        _judge(drawn(files, options.count, options.seed), options)
        return 0
    finally:
        end_children()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--files", nargs="+", help="files of the product to mutate")
    what.add_argument("--compare", type=Path, help="judge those again that this file says were killed")
    parser.add_argument("--tests", nargs="+", help="to judge with; default: the fast tier, then the full one")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of each tier's tests")
    parser.add_argument("--count", type=int, default=40, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn follows from it")
    parser.add_argument("--out", type=Path, help="file of JSON lines; a run goes on where it stopped")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that a test may hang")
    return parser.parse_args(arguments)


def files_of(patterns: Iterable[str]) -> list[str]:
    """Return the Python files that the patterns match, except kernels."""
    found = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    return sorted(file for file in found if file.endswith(".py") and _DEVICE not in (ROOT / file).read_text())


def drawn(files: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, at most one of each line while lines last."""
    pool = [mutant for file in files for mutant in _mutants(file)]
    random.Random(seed).shuffle(pool)
    first = {(mutant.file, mutant.line): mutant for mutant in reversed(pool)}
    chosen = {mutant.key for mutant in first.values()}
    return sorted(pool, key=lambda mutant: mutant.key not in chosen)[:count]


def _mutants(file: str) -> list[Mutant]:
    return mutants_of(file, (ROOT / file).read_bytes())


def _judge(mutants: Sequence[Mutant], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge mutants, print each verdict and write it to a file; return all rows."""
    rows = {row["key"]: row for row in _read(options.out)} if options.out else {}
    by_key = {mutant.key: mutant for mutant in mutants}
    left = [mutant for key, mutant in by_key.items() if key not in rows]
    with private_copy(ROOT) as tree, tempfile.TemporaryDirectory() as folder:
        tiers = {"": options.tests}
        if left and not options.tests:
            tiers = tests_of_tiers(tree, {mutant.file for mutant in left}, options.budget)
        for tier, tests in tiers.items():
            judging = Judging(tree, Path(folder), tests, options.timeout)
            for verdict in judging.judge(left) if left else ():
                mutant = by_key[verdict.key]
                rows[verdict.key] = {**asdict(verdict), "tier": tier, "mutant": asdict(mutant)}
                print(f"{mutant}\n    {verdict} {tier}", flush=True)
                if options.out and (verdict.killed_by or tier != "fast"):
                    with options.out.open("a") as file:
                        file.write(json.dumps(rows[verdict.key]) + "\n")
            left = [mutant for mutant in left if not rows[mutant.key]["killed_by"]]
    found = [rows[key] for key in by_key]
    print(summary(found))
    return found


def summary(rows: Sequence[dict[str, Any]]) -> str:
    killed = [row["tier"] for row in rows if row["killed_by"]]
    fast = f", the fast tier {killed.count('fast')} of them" if "fast" in killed else ""
    return f"{len(killed)} of {len(rows)} mutants are killed{fast}"


def _compare(options: argparse.Namespace) -> int:
    """Judge again the mutants that were killed before, and print those that survive now."""
    wanted = {row["key"]: row for row in _read(options.compare) if row["killed_by"]}
    files = sorted({row["mutant"]["file"] for row in wanted.values()})
    present = [each for file in files if (ROOT / file).exists() for each in _mutants(file)]
    mutants = {mutant.key: mutant for mutant in present if mutant.key in wanted}
    for key in wanted.keys() - mutants.keys():
        print(f"gone with its code: {key}")
    survive = [row["key"] for row in _judge(list(mutants.values()), options) if not row["killed_by"]]
    for key in survive:
        print(f"NO LONGER KILLED: {mutants[key]}\n    before: {wanted[key]['killed_by']}")
    print(f"{len(survive)} of {len(mutants)} mutants that were killed before survive now")
    return bool(survive)


def _read(path: Path) -> list[dict[str, Any]]:
    """Read lines of JSON. A killed run may have cut off the last one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


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


if __name__ == "__main__":
    sys.exit(main())
