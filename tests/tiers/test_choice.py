"""The fast tier runs the tests that the situation calls for, within bounds of their costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from tests.tiers.costs import Cost, Costs, Module, split

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
