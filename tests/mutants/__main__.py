"""Tells how many small faults of some files the tests find: see docs/testing.md."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.areas import AREAS
from tests.mutants.children import adopt_orphans, end_children
from tests.mutants.job import Verdict, append, mutant_of, read
from tests.mutants.judging import Judging
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.sample import drawn, drawn_of_areas, files_of
from tests.mutants.tiers import Tiers
from tests.mutants.tree import private_copy
from tests.tiers.changes import find_changes

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.files or options.compare) and not options.tests:
        parser.error("--files and --compare need --tests")
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    try:
        return _work(options)
    finally:
        end_children()


def _work(options: argparse.Namespace) -> int:
    if options.compare:
        return _compare(options)
    if not options.files:
        return _measure(options)
    files = files_of(ROOT, options.files)
    if not files:
        sys.exit(f"--files names no Python file: {' '.join(options.files)}")
    _judge(drawn(ROOT, files, options.count, options.seed), options.out, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--files", nargs="+", default=[], help="files of the product to mutate")
    parser.add_argument("--tests", nargs="+", help="test files or folders to judge with")
    parser.add_argument("--area", nargs="+", choices=AREAS, default=list(AREAS), help="without --files")
    parser.add_argument("--budget", type=float, default=60.0, help="CPU seconds of tests for an area")
    parser.add_argument("--count", type=int, default=40, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn follows from it")
    parser.add_argument("--out", type=Path, help="file of JSON lines; a run goes on where it stopped")
    parser.add_argument("--compare", type=Path, help="judge those again that this file says were killed")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds that a test may hang")
    return parser


def _judge(mutants: Sequence[Mutant], out: Path | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge mutants, print each verdict and write it to a file; return all rows."""
    rows = {row["key"]: row for row in read(out)} if out else {}
    by_key = {mutant.key: mutant for mutant in mutants}
    left = [mutant for key, mutant in by_key.items() if key not in rows]

    def say(verdict: Verdict) -> None:
        mutant = by_key[verdict.key]
        rows[verdict.key] = {**asdict(verdict), "mutant": asdict(mutant)}
        if out:
            append(out, rows[verdict.key])
        print(f"{mutant}\n    {_told(verdict)}", flush=True)

    if left:
        with private_copy(ROOT) as tree, tempfile.TemporaryDirectory() as folder:
            files = {mutant.file for mutant in left}
            Judging(tree, Path(folder), options.tests, options.timeout).judge(left, files, say)
    found = [rows[key] for key in by_key]
    killed = sum(bool(row["killed_by"]) for row in found)
    print(f"{killed} of {len(found)} mutants are killed")
    return found


def _measure(options: argparse.Namespace) -> int:
    """Judge mutants of the areas with both tiers and print how many each tier kills."""
    areas: dict[str, list[Mutant]] = {name: [] for name in options.area}
    for name, mutant in drawn_of_areas(ROOT, options.area, options.count, options.seed):
        areas[name].append(mutant)
    by_key = {mutant.key: mutant for mutants in areas.values() for mutant in mutants}
    rows = {row["key"]: row for row in read(options.out)} if options.out else {}

    def say(verdict: Verdict, tier: str) -> None:
        mutant = by_key[verdict.key]
        rows[mutant.key] = {**asdict(verdict), "tier": tier, "mutant": asdict(mutant)}
        if options.out:
            append(options.out, rows[mutant.key])
        print(f"{mutant}\n    {_told(verdict)} {tier if verdict.killed_by else ''}", flush=True)

    with private_copy(ROOT) as tree:
        tiers = Tiers(tree, options.budget, find_changes(ROOT).number, options.timeout)
        for name, mutants in areas.items():
            left = [mutant for mutant in mutants if mutant.key not in rows]
            if left:
                with tempfile.TemporaryDirectory() as folder:
                    tiers.judge(left, Path(folder), say)
            print(f"{name}: {summary(rows[mutant.key] for mutant in mutants)}", flush=True)
    print(summary(rows[mutant.key] for mutants in areas.values() for mutant in mutants))
    return 0


def summary(rows: Iterable[dict[str, Any]]) -> str:
    judged = list(rows)
    killed = [row["tier"] for row in judged if row["killed_by"]]
    fast = killed.count("fast")
    return (
        f"the fast tier kills {fast} of the {len(killed)} that the full tier kills, of {len(judged)} mutants"
    )


def _compare(options: argparse.Namespace) -> int:
    """Judge again the mutants that were killed before, and print those that survive now."""
    before = [row for row in read(options.compare) if row["killed_by"]]
    wanted = {row["key"]: row for row in before}
    files = sorted({mutant_of(row["mutant"]).file for row in before})
    present = [each for file in files if (ROOT / file).exists() for each in _mutants(file)]
    mutants = [mutant for mutant in present if mutant.key in wanted]
    for key in wanted.keys() - {mutant.key for mutant in mutants}:
        print(f"gone with its code: {key}")
    survive = [row for row in _judge(mutants, options.out, options) if not row["killed_by"]]
    for row in survive:
        print(f"NO LONGER KILLED: {mutant_of(row['mutant'])}")
        print(f"    before: {wanted[row['key']]['killed_by']}")
    print(f"{len(survive)} of {len(mutants)} mutants that were killed before survive now")
    return bool(survive)


def _told(verdict: Verdict) -> str:
    told = f"killed by {verdict.killed_by}" if verdict.killed_by else f"SURVIVES {verdict.ran} tests"
    return f"{told} ({verdict.seconds:.1f} s)"


def _mutants(file: str) -> list[Mutant]:
    return mutants_of(file, (ROOT / file).read_bytes())


if __name__ == "__main__":
    sys.exit(main())
