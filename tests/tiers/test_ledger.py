"""The ledger counts each second of CPU time once, whichever process spends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.ledger import TAG, Ledger

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
