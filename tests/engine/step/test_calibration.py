"""Step times are measured at the start despite temporary disturbances."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from costs.steps import StepWork
from engine.step import profiling
from engine.step.profiling import measure_steps

DISTURBED_S = 0.1
QUICK_S, SLOW_S = 0.001, 0.2


@pytest.fixture(scope="module", autouse=True)
def quick_starts() -> None:
    """Turn quick starts off: this module tests repeated runs."""


class Machine:
    """A clock, and steps that take `step_s`, or ten times that in the first tenth of a second."""

    def __init__(self, step_s: float) -> None:
        self.now = 0.0
        self.runs = 0
        self._step_s = step_s

    def sequences(self, count: int, num_tokens: int, room: int) -> list[Any]:
        return [
            SimpleNamespace(num_computed=0, request_id=str(index), sampling_row=lambda: None)
            for index in range(count)
        ]

    def forward(self, sequences: list[Any], *, wants_hidden: bool) -> SimpleNamespace:
        self.runs += 1
        self.now += self._step_s * (10 if self.now < DISTURBED_S else 1)
        return SimpleNamespace(logits=None)

    def sample(self, logits: object, rows: object) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


def measured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepWork, float]]:
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    return measure_steps(machine, machine, max_sequences=8, max_chunk=512)  # type: ignore[arg-type]


def test_a_temporary_disturbance_affects_no_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Machine(QUICK_S), monkeypatch)
    assert len({work for work, _ in found}) == len(found) == 6
    assert [seconds for _, seconds in found] == pytest.approx([QUICK_S] * 6)


def test_slow_steps_are_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(SLOW_S)
    assert len(measured(machine, monkeypatch)) == 6
    assert machine.runs == 12
