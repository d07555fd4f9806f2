"""The measurement of the host's part of a step: the engine decodes with a device that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

from bench.host_step import engine_of, step_times


def test_it_times_steps_of_all_requests(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, 3, 200)
    assert engine.start_up["forward"] == "CUDA decoder, eager"
    times = step_times(engine, 3, 20, 5)
    assert len(times) == 5
    assert min(times) > 0
    assert engine.num_running == 3
    assert engine._launcher.is_ahead
