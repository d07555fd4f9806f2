"""Mutants are small faults that compile; tests that run them kill them, in memory or from the file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import drawn, files_of, summary
from tests.mutants.children import in_child
from tests.mutants.inside import functions_of, replace
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.verdicts import Baseline, Module

ROOT = Path(__file__).parents[2]
SOURCE = b'''"""Adds."""
import logging

logger = logging.getLogger(__name__)
LIMIT = 3
UNUSED = 5


class Sum:
    """Adds up to 7."""

    total: int = 0

    def add(self, *numbers: int) -> int:
        logger.info("adds 9")
        for number in numbers:
            if number < LIMIT and not (
                number == 2
            ):
                self.total += number
        return min(self.total, 100)

    def __repr__(self) -> str:
        return "1" * 2


def unused(a: int) -> int:
    return a + 1
'''


def of(operator: str) -> list[Mutant]:
    return [mutant for mutant in mutants_of("sums.py", SOURCE) if mutant.operator == operator]


def test_operators_change_code_but_no_messages() -> None:
    assert [mutant.after for mutant in of("swap a comparison")] == [
        "number <= LIMIT",
        "number >= LIMIT",
        "number != 2",
    ]
    assert [(mutant.before, mutant.line) for mutant in of("change a constant")] == [
        ("3", 5),
        ("5", 6),
        ("0", 12),
        ("2", 18),
        ("100", 21),
        ("1", 28),
    ]
    assert [mutant.after for mutant in of("swap min and max, any and all")] == ["max"]
    assert [mutant.before for mutant in of("drop an assignment")] == ["self.total += number"]
    assert not of("drop a call")


def test_a_mutant_keeps_its_name_when_lines_move_and_moves_no_lines() -> None:
    mutants = mutants_of("sums.py", SOURCE)
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    moved = mutants_of("sums.py", b"\n\n" + SOURCE)
    assert [mutant.key for mutant in moved] == [mutant.key for mutant in mutants]
    assert {mutant.applied(SOURCE).count(b"\n") for mutant in mutants} == {SOURCE.count(b"\n")}
    assert all(mutant.applied(SOURCE) != SOURCE for mutant in mutants)
    assert all(mutant.applied(SOURCE).endswith(SOURCE[-20:]) for mutant in mutants if mutant.line < 20)


def test_the_draw_follows_from_the_seed() -> None:
    files = files_of(["router/placement/*.py", "engine/sampler/triton_kernel/*.py"])
    assert "router/placement/predict.py" in files and "engine/sampler/triton_kernel/scan.py" not in files
    assert drawn(files[:3], 8, seed=1) == drawn(files[:3], 8, seed=1)
    assert drawn(files[:3], 8, seed=1) != drawn(files[:3], 8, seed=2)


def test_a_living_function_gets_the_mutated_code(tmp_path: Path) -> None:
    file = str(tmp_path / "sums.py")
    space: dict[str, Any] = {"__name__": "sums"}
    exec(compile(SOURCE, file, "exec"), space)
    living = space["Sum"]()
    assert living.add(1, 2, 5) == 1
    (mutant,) = of("drop an assignment")
    assert replace(functions_of([file])[file], SOURCE, mutant.applied(SOURCE), file) == 1
    assert living.add(1, 2, 5) == 1
    assert space["Sum"]().add(1) == 0


def test_a_child_that_hangs_or_crashes_keeps_its_lines() -> None:
    def hang(say: object) -> None:
        assert callable(say)
        say("begun")
        time.sleep(60)

    assert in_child(hang, 0.2) == (["begun"], False)
    assert in_child(lambda say: os._exit(3), 5) == ([], False)
    assert in_child(lambda say: say("x" * 200_000), 5) == (["x" * 200_000], True)


def test_tests_reach_mutants_in_their_own_and_their_fixtures_lines() -> None:
    (mutant,) = of("drop an assignment")
    tests = {
        "a": Baseline(0.1, True, lines={"sums.py": [20]}),
        "b": Baseline(0.1, True),
        "c": Baseline(0.1, False),
    }
    assert Module(tests).reaching(mutant) == ["a"]
    assert Module(tests, {"sums.py": [19, 20]}).reaching(mutant) == ["a", "b"]


def test_the_closing_line_counts_what_each_tier_kills() -> None:
    rows = [
        {"killed_by": "a", "tier": "fast"},
        {"killed_by": "b", "tier": "full"},
        {"killed_by": "", "tier": "full"},
    ]
    assert summary(rows) == "2 of 3 mutants are killed, the fast tier 1 of them"
    assert summary([{"killed_by": "a", "tier": ""}]) == "1 of 1 mutants are killed"


TESTS = """
import subprocess, sys
from product.sums import Sum

def test_here():
    assert Sum().add(1, 2, 3) == 1

def test_in_a_process():
    program = "from product.sums import unused; assert unused(1) == 2"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "product").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "product/__init__.py").touch()
    (root / "product/sums.py").write_bytes(SOURCE)
    (root / "tests/test_sums.py").write_text(TESTS)
    (root / "tests/conftest.py").touch()
    for package in ("mutants", "tiers"):
        (root / "tests" / package).symlink_to(ROOT / "tests" / package)
    (root / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_packages = ["product"]\n[tool.pytest.ini_options]\ntestpaths = ["tests"]\n'
    )
    return root


PROGRAM = """
from pathlib import Path
from tests.mutants.judging import Judging
from tests.mutants.operators import mutants_of

file = "product/sums.py"
mutants = mutants_of(file, Path(file).read_bytes())
chosen = [m for m in mutants if m.before in ("5", "1") or m.operator == "drop an assignment"]
judging = Judging(Path.cwd(), Path("..").resolve(), ["tests/test_sums.py"], 20)
for verdict in judging.judge(chosen):
    print(verdict.key, "by", verdict.killed_by or "none")
"""


def test_mutants_die_in_memory_and_from_the_file(tree: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tree, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line.partition(" | ")[2] for line in done.stdout.splitlines()] == [
        "Sum.add | drop an assignment | self.total += number | pass | 0 by tests/test_sums.py::test_here",
        " | change a constant | 5 | 6 | 0 by none",
        "unused | change a constant | 1 | 2 | 0 by tests/test_sums.py::test_in_a_process",
    ]
