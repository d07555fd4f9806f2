"""Costs of tests: CPU time counts once, is divided among tests that share it, and is kept in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.costs import Cost, Costs, Module, dump, load
from tests.tiers.recorder import TAG, Ledger, Row, shared_out

SPENT_S = 0.3
SPEND = f"import time\nend = time.process_time() + {SPENT_S}\nwhile time.process_time() < end: pass\n"
SPEND_AND_WAIT = f"{SPEND}print(flush=True)\ninput()\n"
LAUNCH = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
print(subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
"""Starts a program that outlives the launcher, and prints its process id."""


def spend() -> None:
    end = time.process_time() + SPENT_S
    while time.process_time() < end:
        pass


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setenv(TAG, "")  # so that the end of the test restores it
    return Ledger()


def test_its_own_time_counts(ledger: Ledger) -> None:
    before = ledger.read()
    spend()
    assert SPENT_S <= ledger.read() - before < 2 * SPENT_S


def test_readings_cost_nothing(ledger: Ledger) -> None:
    before, began = ledger.read(), time.process_time()
    while time.process_time() < began + SPENT_S:
        spent = ledger.read() - before
    assert spent < SPENT_S / 2


IN_A_GRANDCHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPEND_AND_WAIT!r}])\n"


@pytest.mark.parametrize("program", [SPEND_AND_WAIT, IN_A_GRANDCHILD], ids=["child", "grandchild"])
def test_a_started_process_counts_once_while_it_runs_and_after_its_end(ledger: Ledger, program: str) -> None:
    before = ledger.read()
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    running = ledger.read() - before
    assert SPENT_S <= running < 2 * SPENT_S
    child.communicate(b"\n")
    assert running <= ledger.read() - before < running + SPENT_S / 2


def test_a_process_that_leaves_the_tree_counts(ledger: Ledger, tmp_path: Path) -> None:
    before = ledger.read()
    ready = tmp_path / "ready"
    daemon = f"{SPEND}import pathlib, time\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    done = subprocess.run([sys.executable, "-c", LAUNCH, daemon], check=True, stdout=subprocess.PIPE)
    while not ready.exists():
        time.sleep(0.01)
    counted = ledger.read() - before
    os.kill(int(done.stdout), signal.SIGKILL)
    assert counted >= SPENT_S


def test_other_processes_do_not_count(ledger: Ledger) -> None:
    outside = {key: value for key, value in os.environ.items() if key != TAG}
    before = ledger.read()
    subprocess.run([sys.executable, "-c", LAUNCH, SPEND], env=outside, check=True, stdout=subprocess.PIPE)
    launched = ledger.read() - before
    time.sleep(2 * SPENT_S)
    assert ledger.read() - before - launched < SPENT_S / 2


SERVER, MODEL = "tests::server[0]", "tests::model[0]"


def test_a_shared_fixture_is_paid_by_all_its_tests() -> None:
    rows = [
        Row("first", 0.2, 1.0, {SERVER: (3.0, 6.0), MODEL: (1.5, 1.5)}, [MODEL, SERVER]),
        Row("second", 0.1, 0.5, {}, [MODEL, SERVER]),
        Row("third", 0.1, 0.1, {}, [MODEL]),
        Row("alone", 0.4, 0.4),
    ]
    shares = {name: (cost.cpu_s, cost.wall_s) for name, cost in shared_out(map(vars, rows)).items()}
    assert shares == {
        "first": pytest.approx((2.2, 4.5)),
        "second": pytest.approx((2.1, 4.0)),
        "third": pytest.approx((0.6, 0.6)),
        "alone": (0.4, 0.4),
    }


def test_a_fixture_of_several_modules_is_made_in_each() -> None:
    rows = [Row(name, 0.0, 0.0, {SERVER: (1.0, 1.0)}, [SERVER]) for name in "ab"] + [Row("c", uses=[SERVER])]
    assert shared_out(map(vars, rows))["c"].cpu_s == pytest.approx(2 / 3)


def test_a_fixture_requested_during_a_test_is_its_own() -> None:
    assert shared_out([vars(Row("a", 0.5, 0.5, {SERVER: (1.0, 1.0)}))]) == {"a": Cost(1.5, 1.5)}


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
