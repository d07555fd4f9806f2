"""Costs survive writing and reading, and change only if a new recording differs by much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiers.costs import Cost, Costs, Module, dump, load

ONE, TWO = "tests/test_one.py", "tests/a/test_two.py"
RECORD = Costs(
    {
        ONE: Module(Cost(3.0, 20.0), {"test_b[x y]": Cost(1.2, 4.0), "test_a": Cost(0.6, 0.7)}),
        TWO: Module(Cost(0.1, 0.1)),
    }
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path in (ONE, TWO):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


def test_written_costs_are_read_back_from_a_line_for_each_expensive_test(root: Path) -> None:
    assert load(root) == Costs()
    dump(RECORD, root)
    assert load(root) == RECORD
    text = (root / "tests/costs.json").read_text()
    assert list(json.loads(text)) == [TWO, ONE]
    assert len(text.splitlines()) == 7 and '  "test_b[x y]": [1.2, 4]' in text.splitlines()


def test_cheap_and_new_tests_have_no_cost() -> None:
    assert RECORD.of(f"{ONE}::test_a") == Cost(0.6, 0.7)
    assert RECORD.of(f"{ONE}::test_cheap") is None
    assert RECORD.of("tests/test_new.py::test_a") is None


def test_an_estimate_counts_the_cheap_tests_of_each_module_once() -> None:
    assert RECORD.estimate(
        [f"{ONE}::test_a", f"{ONE}::test_cheap", f"{TWO}::test_cheap"]
    ).cpu_s == pytest.approx(3.7)


@pytest.mark.parametrize(
    ("before", "after", "is_expensive"),
    [(0.6, 0.45, True), (0.6, 0.3, False), (None, 0.6, False), (None, 0.8, True)],
)
def test_a_test_changes_its_tier_only_for_a_clear_difference(
    root: Path, before: float | None, after: float, is_expensive: bool
) -> None:
    old = Costs({ONE: Module(Cost(1, 1), {"test_a": Cost(before, 1)} if before else {})})
    new = old.updated({f"{ONE}::test_a": Cost(after, 1)}, root)
    assert (new.of(f"{ONE}::test_a") is not None) == is_expensive


def test_a_new_module_takes_the_recorded_figures(root: Path) -> None:
    new = Costs().updated({f"{ONE}::test_a": Cost(0.567, 3.21), f"{ONE}::test_b": Cost(0.45, 40.123)}, root)
    assert new == Costs({ONE: Module(Cost(0.5, 40.0), {"test_a": Cost(0.6, 3.2)})})


def test_a_figure_stays_until_a_new_one_differs_by_half(root: Path) -> None:
    new = RECORD.updated({f"{ONE}::test_a": Cost(0.8, 2.0), f"{ONE}::test_b[x y]": Cost(2.0, 4.4)}, root)
    assert new.modules[ONE].expensive == {"test_a": Cost(0.6, 2.0), "test_b[x y]": Cost(2.0, 4.0)}


def test_modules_that_did_not_run_stay_and_deleted_ones_go(root: Path) -> None:
    (root / ONE).unlink()
    assert RECORD.updated({}, root) == Costs({TWO: RECORD.modules[TWO]})


def test_a_recording_of_a_slower_machine_is_scaled(root: Path) -> None:
    names = [f"test_{number}" for number in range(30)]
    old = Costs({ONE: Module(Cost(1, 1), {name: Cost(number + 1, 1) for number, name in enumerate(names)})})
    slower = {f"{ONE}::{name}": Cost(2 * (number + 1), 2) for number, name in enumerate(names)}
    assert (
        old.updated(slower | {f"{ONE}::test_new": Cost(0.8, 1)}, root).modules[ONE].expensive
        == old.modules[ONE].expensive
    )
