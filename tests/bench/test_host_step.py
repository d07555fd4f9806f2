"""The measurement of the host's part of a step, with a device that computes nothing. The tests count calls
and operators, because times differ between machines.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is for Linux")

from bench.host_step import engine_of, step_times
from engine.engine import Engine

MOST_CALLS = 60
"""Limit on calls of Python functions for each row. There were 35; 64 rows took 1.3 ms."""


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Yield the list of names of the Python functions called so far."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def decoding(folder: Path, sequences: int, context: int) -> Engine:
    engine = engine_of(folder, sequences, 600)
    step_times(engine, sequences, context, 3)
    assert engine.num_running == sequences
    return engine


def test_a_step_launches_as_many_operators_for_any_number_of_rows(tmp_path: Path) -> None:
    """The step's inputs come in one copy, except for the tokens, which stay on the device."""
    counts = []
    for sequences in (3, 24):
        engine = decoding(tmp_path, sequences, 20)
        with Operators() as operators:
            engine.step()
        counts.append(operators.counts)
    assert counts[0] == counts[1]
    assert counts[0]["copy_"] == 2


def test_a_row_takes_as_many_calls_behind_any_context(tmp_path: Path) -> None:
    counts = {}
    for sequences, context in ((4, 20), (4, 400), (16, 20)):
        engine = decoding(tmp_path, sequences, context)
        with counted_calls() as calls:
            engine.step()
        counts[sequences, context] = len(calls)
    assert abs(counts[4, 400] - counts[4, 20]) < 4, "not one more for each row"
    assert counts[16, 20] - counts[4, 20] <= 12 * MOST_CALLS


def test_it_times_steps_of_all_requests(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 3, 200)
    assert engine.start_up["forward"] == "CUDA decoder, eager"
    times = step_times(engine, 3, 20, 5)
    assert len(times) == 5
    assert min(times) > 0
    assert engine.num_running == 3
    assert engine._launcher.is_ahead
