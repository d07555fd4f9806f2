"""The fast tier runs all cheap tests, and of the expensive ones those of the situation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiers.canaries import CANARIES
from tests.tiers.choice import DEAREST_CPU_S, REACH_CPU_S, TENTHS, Situation, choose, missing
from tests.tiers.costs import Cost, Costs, Module, split

A, B, C = "tests/test_a.py", "tests/test_b.py", "tests/test_c.py"


def record(**costs: dict[str, float]) -> Costs:
    """The costs of modules a, b and c."""
    return Costs(
        {
            f"tests/test_{name}.py": Module(
                Cost(1, 1), {test: Cost(cpu_s, 1) for test, cpu_s in tests.items()}
            )
            for name, tests in costs.items()
        }
    )


def chosen(tests: list[str], costs: Costs, situation: Situation = Situation()) -> set[str]:
    """What runs at each commit: not for being in its tenth."""
    runs = [choose(tests, costs, replace(situation, commit=commit)).chosen for commit in range(TENTHS)]
    return set.intersection(*runs)


def test_cheap_and_new_tests_run_and_expensive_ones_are_left_out_with_their_costs() -> None:
    tests = [f"{A}::cheap", f"{A}::dear", "tests/test_new.py::test"]
    assert chosen(tests, record(a={"dear": 2.0})) == {tests[0], tests[2]}
    left_out = [choose(tests, record(a={"dear": 2.0}), Situation(commit=n)).left_out for n in range(TENTHS)]
    assert left_out.count({tests[1]: Cost(2.0, 1)}) == TENTHS - 1


def test_of_a_module_without_cheap_tests_the_cheapest_runs() -> None:
    costs = record(a={"x": 3.0, "y": 2.0}, b={"z": DEAREST_CPU_S + 1})
    assert chosen([f"{A}::x", f"{A}::y", f"{B}::z"], costs) == {f"{A}::y"}


def test_canaries_run_at_any_cost() -> None:
    tests = [f"{A}::cheap", f"{A}::dear"]
    assert chosen(tests, record(a={"dear": 1000.0}), Situation(canaries=[tests[1]])) == set(tests)


def test_a_canary_that_is_gone_from_its_module_is_named() -> None:
    assert missing([f"{A}::x", f"{A}::y", f"{B}::z"], [f"{A}::x", f"{C}::x"]) == [f"{A}::y"]


def test_the_modules_of_all_canaries_exist() -> None:
    root = Path(__file__).parents[2]
    assert {path for path, _ in map(split, CANARIES.values()) if not (root / path).exists()} == set()


def test_all_tests_of_a_changed_module_run() -> None:
    tests = [f"{A}::{name}" for name in "xyz"]
    assert chosen(tests, record(a=dict.fromkeys("xyz", 1000.0)), Situation(distances={A: 0})) == set(tests)


def test_what_the_diff_reaches_runs_the_nearest_first_up_to_a_bound() -> None:
    most = REACH_CPU_S / 5
    tests = [f"{B}::cheap", f"{C}::cheap", *(f"{module}::{name}" for module in (B, C) for name in "wxyz")]
    costs = record(b=dict.fromkeys("wxyz", most), c=dict.fromkeys("wxyz", most))
    assert chosen(tests, costs, Situation(distances={B: 2, C: 1})) == {
        f"{B}::cheap",
        f"{C}::cheap",
        *(f"{C}::{name}" for name in "wxyz"),
        f"{B}::w",
    }
    choice = choose(tests, costs, Situation(distances={B: 2}))
    assert choice.reached == {f"{B}::{name}" for name in "wxyz"} & choice.left_out.keys()


def test_ten_commits_in_a_row_run_every_expensive_test_but_the_dearest() -> None:
    names = [f"test_{number}" for number in range(200)]
    costs = record(a=dict.fromkeys(names, 1.0) | {"dearest": DEAREST_CPU_S + 1})
    tests = [f"{A}::cheap", f"{A}::dearest", *(f"{A}::{name}" for name in names)]
    runs = [choose(tests, costs, Situation(commit=commit)).chosen for commit in range(1234, 1234 + TENTHS)]
    assert set.union(*runs) == set(tests) - {f"{A}::dearest"}
    assert all(5 < len(run) < 40 for run in runs)


@pytest.mark.parametrize("order", [1, -1])
def test_the_choice_does_not_depend_on_the_order(order: int) -> None:
    tests = [f"{A}::{name}" for name in "vwxyz"][::order]
    costs = record(a=dict.fromkeys("vwxyz", 2.0))
    assert choose(tests, costs, Situation()).chosen == choose(sorted(tests), costs, Situation()).chosen
