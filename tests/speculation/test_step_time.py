"""The step-time model: measured shapes, and how real steps correct them without trusting any one of them."""

from __future__ import annotations

import random
import statistics

import pytest

from speculation.control.step_time import (
    DraftTime,
    DraftTimes,
    RunningMedian,
    SurroundingTime,
    TargetTime,
    TargetTimes,
)

TIMES = TargetTimes(
    rows=(1, 4, 16, 64),
    seconds=(2e-3, 3e-3, 5e-3, 13e-3),
    per_sequence=1e-4,
    per_context=1e-6,
    per_attended=1e-7,
)


def made() -> TargetTime:
    return TargetTime(TIMES, 256)


def truth(num_sequences: int, rows: int, context: float) -> float:
    return made().seconds(num_sequences, rows, context)


def test_measured_shapes_interpolated_and_continued() -> None:
    model = TargetTime(TargetTimes((1, 4, 16, 64), (2e-3, 3e-3, 5e-3, 13e-3)), 256)
    assert model.seconds(1, 4, 0.0) == pytest.approx(3e-3)
    assert model.seconds(1, 10, 0.0) == pytest.approx(4e-3)
    assert model.seconds(1, 112, 0.0) == pytest.approx(21e-3)
    assert model.seconds(1, 5000, 0.0) == model.seconds(1, 256, 0.0)


def test_sequences_and_context_cost_too() -> None:
    model = made()
    assert model.seconds(4, 8, 1000.0) - model.seconds(3, 8, 1000.0) == pytest.approx(1e-4 + 1e-3)
    assert model.seconds(4, 8, 1000.0) - model.seconds(4, 8, 0.0) == pytest.approx(1000 * (4e-6 + 8e-7))


def test_the_curve_of_a_batch_is_its_seconds() -> None:
    model = made()
    curve = model.curve(4, 30, 500.0)
    assert curve == pytest.approx([model.seconds(4, 4 + more, 500.0) for more in range(31)])
    assert len(model.curve(4, 1000, 500.0)) == 256 - 4 + 1


def test_a_noisy_measurement_leaves_no_dent() -> None:
    model = TargetTime(TargetTimes((1, 2, 4, 8), (9e-3, 2e-3, 3e-3, 4e-3)), 64)
    curve = model.curve(1, 60, 0.0)
    assert curve == sorted(curve)
    assert curve[0] < 7e-3


def test_one_slow_step_moves_little() -> None:
    model = made()
    before = model.seconds(4, 12, 100.0)
    for _ in range(15):
        model.observe(4, 12, 100.0, truth(4, 12, 100.0))
    model.observe(4, 12, 100.0, 100 * before)
    assert model.seconds(4, 12, 100.0) == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("slow", [0.5, 3.0])
def test_a_machine_that_changes_its_pace_is_followed_at_every_size(slow: float) -> None:
    model = made()
    for _ in range(160):
        model.observe(4, 12, 100.0, slow * truth(4, 12, 100.0))
    assert model.seconds(4, 12, 100.0) == pytest.approx(slow * truth(4, 12, 100.0), rel=0.05)
    assert model.seconds(4, 40, 100.0) == pytest.approx(slow * truth(4, 40, 100.0), rel=0.35)


def test_a_wrong_shape_is_mended_where_steps_are_seen() -> None:
    def real(rows: int) -> float:
        return truth(4, rows, 100.0) * (1.5 if rows > 20 else 1.0)

    model = made()
    for step in range(1600):
        rows = 40 if step % 4 == 0 else 4
        model.observe(4, rows, 100.0, real(rows))
    for rows in (4, 40):
        assert model.seconds(4, rows, 100.0) == pytest.approx(real(rows), rel=0.06)


def test_the_first_steps_of_a_size_set_its_time() -> None:
    """Other sizes take it over until they are seen themselves."""
    model = made()
    small, large = truth(4, 4, 0.0), truth(4, 64, 0.0)
    for _ in range(8):
        model.observe(4, 4, 0.0, 1.3 * small)
    assert model.seconds(4, 4, 0.0) == pytest.approx(1.3 * small, rel=0.1)
    assert model.seconds(4, 64, 0.0) == pytest.approx(1.3 * large, rel=0.1)
    for _ in range(8):
        model.observe(4, 64, 0.0, large)
    assert model.seconds(4, 64, 0.0) == pytest.approx(large, rel=0.1)
    assert model.seconds(4, 4, 0.0) == pytest.approx(1.3 * small, rel=0.1)


def test_outliers_do_not_shift_the_estimate() -> None:
    model, noise = made(), random.Random(3)
    for _ in range(800):
        slow = noise.lognormvariate(0, 0.1) * (10 if noise.random() < 0.05 else 1)
        model.observe(4, 12, 100.0, slow * truth(4, 12, 100.0))
    assert model.seconds(4, 12, 100.0) == pytest.approx(truth(4, 12, 100.0), rel=0.08)


def test_the_published_knots_rise() -> None:
    model = made()
    for _ in range(800):  # a size at which steps happen to be slow
        model.observe(1, 4, 0.0, 5 * truth(1, 4, 0.0))
        model.observe(1, 64, 0.0, truth(1, 64, 0.0))
    rows, seconds = model.knots()
    assert rows == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert seconds == sorted(seconds)


def test_drafting_time_is_scaled_to_what_it_takes() -> None:
    time = DraftTime(DraftTimes(start=1e-3, per_level=2e-3, per_token=1e-4))
    for _ in range(200):
        time.observe(3, 10, 0, 2 * (1e-3 + 6e-3 + 1e-3))
    assert time.times.per_level == pytest.approx(4e-3, rel=0.05)


def test_drafting_that_was_never_measured_is_learned() -> None:
    time = DraftTime()
    assert time.times == DraftTimes()
    for _ in range(100):
        time.observe(3, 10, 0, 2e-3)
    times = time.times
    assert times.start + times.per_level * 3 + times.per_token * 10 == pytest.approx(2e-3, rel=0.05)


def test_surroundings_by_batch_size_and_kind() -> None:
    time = SurroundingTime(64)
    assert time.seconds(1, False) == time.seconds(1, True) == 0.0
    for _ in range(50):
        time.observe(1, False, 1e-4)
        time.observe(32, False, 9e-4)
    assert time.seconds(1, False) == time.seconds(1, True) == pytest.approx(1e-4)
    time.observe(1, True, 3e-4)
    assert time.seconds(1, True) == pytest.approx(3e-4)
    assert time.seconds(40, False) == pytest.approx(9e-4)
    assert time.seconds(2, False) == pytest.approx(1e-4)
    assert time.seconds(500, False) == pytest.approx(9e-4)


def test_the_running_median_forgives_a_bad_start() -> None:
    median, noise = RunningMedian(), random.Random(1)
    median.observe(1.0)
    values = [noise.lognormvariate(-7, 0.2) for _ in range(150)]
    for value in values:
        median.observe(value)
    assert median.value == pytest.approx(statistics.median(values), rel=0.2)
    median.observe(1.0)
    assert median.value == pytest.approx(statistics.median(values), rel=0.2)


def test_what_is_read_does_not_pass_for_slow_drafting() -> None:
    time = DraftTime(DraftTimes(start=1e-3, per_level=2e-3, per_token=1e-4, per_read=1e-5))
    for _ in range(200):
        time.observe(3, 10, 500, 8e-3 + 500e-5)
    assert time.times.per_level == pytest.approx(2e-3, rel=0.01)
    assert time.times.per_read == 1e-5
