"""The fast tier's choice of tests, and a run by it: its modules, its seed and its last line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiers.canaries import CANARIES
from tests.tiers.choice import (
    CHANGED_CPU_S,
    CHEAP_CPU_S,
    CHEAPEST_CPU_S,
    DEAREST_CPU_S,
    READING,
    TENTHS,
    Situation,
    choose,
    missing,
)
from tests.tiers.costs import Cost, Costs, Module, dump, load, split
from tests.tiers.plugin import NO_REASON, Chooser, closing_line, reasons_of
from tests.tiers.seeds import VARIABLE, seed, seeds, set_seed

A, B, C = "tests/test_a.py", "tests/test_b.py", "tests/test_c.py"


ALL = Situation(everything=True)


def record(**costs: dict[str, float]) -> Costs:
    """Return the costs of modules a, b and c."""
    return Costs(
        {
            f"tests/test_{name}.py": Module(
                Cost(1, 1), {test: Cost(cpu_s, 1) for test, cpu_s in tests.items()}
            )
            for name, tests in costs.items()
        }
    )


def chosen(tests: list[str], costs: Costs, situation: Situation = ALL) -> set[str]:
    """Return the tests that run at every commit, whatever its tenth."""
    runs = [choose(tests, costs, replace(situation, commit=commit)).chosen for commit in range(TENTHS)]
    return set.intersection(*runs)


def test_cheap_and_new_tests_run_and_expensive_ones_are_left_out_with_their_costs() -> None:
    tests = [f"{A}::cheap", f"{A}::dear", "tests/test_new.py::test"]
    assert chosen(tests, record(a={"dear": 2.0})) == {tests[0], tests[2]}
    left_out = [
        choose(tests, record(a={"dear": 2.0}), replace(ALL, commit=n)).left_out for n in range(TENTHS)
    ]
    assert left_out.count({tests[1]: Cost(2.0, 1)}) == TENTHS - 1


def test_a_module_without_cheap_tests_runs_its_cheapest() -> None:
    costs = record(a={"x": 3.0, "y": 2.0}, b={"z": CHEAPEST_CPU_S + 0.1})
    assert chosen([f"{A}::x", f"{A}::y", f"{B}::z"], costs) == {f"{A}::y"}


def test_cheap_tests_run_if_the_changes_reach_them_nearest_first_or_else_in_their_tenth() -> None:
    near = Module(Cost(CHEAP_CPU_S * 0.6, 1))
    costs = Costs({A: near, B: near, C: Module(Cost(0.1, 1))})
    tests = [f"{path}::test" for path in (C, B, A)]
    situation = Situation(distances={A: 1, B: 2})
    assert chosen(tests, costs, situation) == {f"{A}::test"}
    assert choose(tests, costs, replace(situation, commit=9)).reached == {f"{B}::test"}
    runs = [choose(tests, costs, replace(situation, commit=commit)).chosen for commit in range(TENTHS)]
    assert set.union(*runs) == set(tests)
    assert chosen(tests, costs, Situation(distances={A: 0, B: 0})) == set(tests[1:]), "they changed"


def test_tests_that_read_the_product_run_always() -> None:
    tests = [f"{READING[0]}test_links.py::test", f"{READING[1]}::test"]
    costs = Costs({split(test)[0]: Module(Cost(1, 1)) for test in tests})
    assert chosen(tests, costs, Situation()) == set(tests)


@pytest.mark.parametrize("named", [{"canaries": [f"{A}::dear"]}, {"whole": [A]}])
def test_canaries_and_whole_modules_run_at_any_cost(named: dict[str, Any]) -> None:
    tests = [f"{A}::dear", f"{A}::cheap"]
    assert chosen(tests, record(a={"dear": 1000.0}), replace(ALL, **named)) == set(tests)


def test_a_canary_that_is_gone_from_its_module_is_named() -> None:
    assert missing([f"{A}::x", f"{A}::y", f"{B}::z"], [f"{A}::x", f"{C}::x"]) == [f"{A}::y"]


def test_the_modules_of_all_canaries_exist() -> None:
    root = Path(__file__).parents[2]
    assert {path for path, _ in map(split, CANARIES.values()) if not (root / path).exists()} == set()


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        ({A: 0, B: 1}, [(A, 8), (B, 4)]),
        ({A: 1, B: 0}, [(B, 8), (A, 4)]),
        ({A: 1, B: 1, C: 1}, [(C, 2), (A, 8), (B, 2)]),
    ],
)
def test_changed_modules_and_reached_tests_share_one_bound(
    distances: dict[str, int], expected: list[tuple[str, int]]
) -> None:
    """The nearest modules come first, and of equally near ones the cheaper."""
    numbers = [str(number) for number in range(8)]
    costs = record(a=dict.fromkeys(numbers, CHANGED_CPU_S / 12), b=dict.fromkeys(numbers, CHANGED_CPU_S / 12))
    costs.modules |= record(c=dict.fromkeys(numbers[:2], CHANGED_CPU_S / 12)).modules
    cheap = {f"{module}::cheap" for module in (A, B, C)}
    tests = [*cheap, *(f"{path}::{name}" for path in (A, B, C) for name in costs.modules[path].expensive)]
    runs = {f"{module}::{name}" for module, count in expected for name in numbers[:count]}
    situation = replace(ALL, distances=distances)
    assert chosen(tests, costs, situation) == cheap | runs
    choice = choose(tests, costs, situation)
    assert choice.reached == {test for test in choice.left_out if split(test)[0] in distances}


def test_a_dear_test_runs_if_its_own_module_changed() -> None:
    tests, costs = [f"{A}::cheap", f"{A}::x"], record(a={"x": DEAREST_CPU_S + 1})
    assert chosen(tests, costs, replace(ALL, distances={A: 0})) == set(tests)
    assert chosen(tests, costs, replace(ALL, distances={A: 1})) == {f"{A}::cheap"}


def test_ten_commits_in_a_row_run_every_expensive_test_but_the_dearest() -> None:
    """A module's tests run at the same commit, since they share fixtures. Each commit's tests cost about the
    same.
    """
    names = [str(number) for number in range(50)]
    costs = record(**{name: {"x": 1.1 + int(name) / 10, "y": 1.0, "z": DEAREST_CPU_S + 1} for name in names})
    tests = [f"tests/test_{name}.py::{test}" for name in names for test in "xyz"]
    runs = [choose(tests, costs, Situation(commit=commit)).chosen for commit in range(1234, 1234 + TENTHS)]
    tenths = [{test for test in run if test.endswith("x")} for run in runs]
    assert set.union(*tenths) == {test for test in tests if test.endswith("x")}
    assert sum(map(len, tenths)) == len(names), "one at a time"
    assert all(
        test.replace("::x", "::y") in run for run, tenth in zip(runs, tenths, strict=True) for test in tenth
    )
    spent = [sum(costs.modules[split(test)[0]].expensive["x"].cpu_s for test in tenth) for tenth in tenths]
    assert max(spent) < 1.2 * min(spent)


ROOT = Path(__file__).parents[2]
MODULE, OTHER = "tests/test_some.py", "tests/test_other.py"
CONFTEST = """
import pytest
from tests.tiers import plugin

pytest_addoption, pytest_configure = plugin.add_options, plugin.register

@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput.update(plugin.worker_input(node.config))
"""
TESTS = """
import time
import pytest

@pytest.fixture(scope="module")
def shared():
    end = time.process_time() + 1.6
    while time.process_time() < end: pass

def test_cheap(): pass
def test_a(shared): pass
def test_b(shared): pass
def test_skipped(): pytest.skip("no such thing")
"""


def run(root: Path, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit status and the last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TEST_SEED": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / MODULE).write_text(TESTS)
    return tmp_path


def test_named_tests_run_at_any_cost_and_fail_on_a_skip_without_a_reason(root: Path) -> None:
    (root / MODULE).write_text(f"{TESTS}\n@pytest.mark.skip\ndef test_unexplained(): pass\n")
    record = Costs(
        {MODULE: Module(Cost(1.0, 1.0), {"test_a": Cost(100.0, 1.0), "test_cheap": Cost(1.0, 1.0)})}
    )
    dump(record, root)
    status, lines = run(root, "--tier", "fast", "--record-costs", MODULE)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert lines[-2] == "FAILED: 1 skips give no reason (-rs shows them)"
    assert lines[-1].startswith(
        "3 passed, 2 skipped (1 no such thing; 1 unconditional skip), fast tier, seed 0 in "
    )
    recorded = load(root).modules[MODULE].expensive
    assert recorded.keys() == {"test_a", "test_b"}
    assert all(0.8 <= cost.cpu_s < 1.2 for cost in recorded.values())


def test_the_fast_tier_leaves_expensive_tests_out(root: Path) -> None:
    names = [f"test_{number}" for number in range(30)]
    (root / MODULE).write_text(TESTS + "".join(f"def {name}(): pass\n" for name in names))
    (root / OTHER).write_text("def test_dear(): pass\n")
    record = {MODULE: Module(Cost(0.1, 0.1), dict.fromkeys(names, Cost(0.1, 1.0)))}
    dump(Costs(record | {OTHER: Module(Cost(0.0, 0.0), {"test_dear": Cost(5.0, 1.0)})}), root)
    status, lines = run(root, "-p", "xdist.plugin", "-n", "1", "--tier", "fast")
    assert status == pytest.ExitCode.OK
    left_out = "3 CPU-s left out in 1 modules"  # this commit's tenth is the other module
    assert lines[-1].startswith(f"4 passed, 1 skipped (1 no such thing), {left_out}, fast tier, seed 0 in ")


def test_modules_without_chosen_tests_are_not_imported(root: Path) -> None:
    far = [root / f"tests/test_far_{number}.py" for number in range(TENTHS)]
    for file in [root / OTHER, *far]:
        file.touch()
    known = [str(file.relative_to(root)) for file in [root / MODULE, *far]]
    dump(Costs({path: Module(Cost(1.0, 1.0), {"test_x": Cost(1.0, 1.0)}) for path in known}), root)
    config: Any = SimpleNamespace(rootpath=root)
    chooser = Chooser(config, Situation(distances={MODULE: 1}, canaries=[f"{known[1]}::test_x"]))
    ignored = {file for file in [root / OTHER, root / MODULE, *far] if chooser.pytest_ignore_collect(file)}
    assert ignored <= {*far[1:]}
    assert len(ignored) >= len(far) - 3, "one or two are in this commit's tenth"
    assert not chooser.pytest_ignore_collect(root / "tests/conftest.py")


def test_the_line_has_counts_reasons_left_out_tests_and_the_time() -> None:
    skips = Counter({"needs an NVIDIA GPU": 3, "no cluster": 1})
    assert closing_line("fast", ["100 passed", "4 skipped"], skips, "9 CPU-s left out", 0, 83.25) == (
        "100 passed, 4 skipped (3 needs an NVIDIA GPU; 1 no cluster), 9 CPU-s left out, "
        "fast tier, seed 0 in 83.2s"
    )
    assert (
        closing_line("full", ["9 passed"], Counter(), "", 17, 2.0) == "9 passed, full tier, seed 17 in 2.0s"
    )


def test_skips_are_counted_by_reason() -> None:
    reports = [
        ("a.py", 1, "Skipped: no GPU"),
        ("b.py", 2, "no GPU"),
        "Skipped: no GPU",
        ("a.py", 1, "Skipped"),
    ]
    assert reasons_of(reports) == {"no GPU": 3, "": 1}
    assert "" in NO_REASON


def test_a_run_has_the_requested_seed_the_inherited_one_a_fresh_one_or_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert set_seed(None, fresh=False) == 0 and list(seeds(3)) == [0, 1, 2]
    os.environ[VARIABLE] = ""
    first = set_seed(None, fresh=True)
    os.environ[VARIABLE] = ""
    second = set_seed(None, fresh=True)
    assert len({0, first, second}) == 3 and seeds(40)[0] == 1000 * second
    os.environ[VARIABLE] = "17"
    assert set_seed(None, fresh=True) == seed() == 17
    assert set_seed(23, fresh=True) == seed() == 23 and list(seeds(2)) == [23000, 23001]
