"""Step times: a measured curve, and how windows of steps correct it without trusting any one of them."""

from __future__ import annotations

import random

import pytest

from speculation.control.settings import Settings
from speculation.control.step_time import DraftTime, MeasuredCurve, TargetTime

CURVE = MeasuredCurve(rows=(1, 4, 16, 64), seconds=(2e-3, 3e-3, 5e-3, 13e-3))


def made() -> TargetTime:
    return TargetTime(CURVE, 256, Settings())


def test_the_curve_is_interpolated_and_continued() -> None:
    target = made()
    assert target.seconds(1, 4) == pytest.approx(3e-3)
    assert target.seconds(1, 10) == pytest.approx(4e-3)
    assert target.seconds(1, 112) == pytest.approx(21e-3)


def test_the_times_of_a_plan_are_the_models() -> None:
    target = made()
    target.observe(4, 4, 5e-3)
    target.observe(4, 12, 7e-3)
    times = target.with_drafts(4, 30)
    assert times == pytest.approx([target.seconds(4, 4 + more) for more in range(31)])
    assert len(target.with_drafts(4, 1000)) == 256 - 4 + 1


def test_the_table_for_the_router_is_the_model() -> None:
    target = made()
    for size in (1, 4, 8):
        for _ in range(9):
            target.observe(size, 3 * size, (1 + size) * 1e-3)
    sequences, drafted = [1, 2, 4, 8, 64], [0, 1, 2, 4, 8]
    for count, seconds in zip(sequences, target.table(sequences, drafted), strict=True):
        expected = [target.seconds(count, count * (1 + each)) for each in drafted]
        assert seconds == pytest.approx([max(expected[: end + 1]) for end in range(5)])


def test_a_noisy_measurement_leaves_no_dent() -> None:
    target = TargetTime(MeasuredCurve((1, 2, 4, 8), (9e-3, 2e-3, 3e-3, 4e-3)), 64, Settings())
    times = target.with_drafts(1, 60)
    assert times == sorted(times)


def test_one_slow_window_moves_little() -> None:
    target = made()
    for _ in range(20):
        target.observe(1, 5, 3.2e-3)
    before = target.seconds(1, 5)
    target.observe(1, 5, 320e-3)
    assert target.seconds(1, 5) < 1.06 * before


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_busy_machine_at_the_start_is_made_up_for(factor: float) -> None:
    target, noise = made(), random.Random(3)
    for _ in range(12):
        target.observe(2, 2, factor * made().seconds(2, 2) * noise.lognormvariate(0, 0.05))
    for rows in (2, 6, 18):
        assert target.seconds(2, rows) == pytest.approx(factor * made().seconds(2, rows), rel=0.1)


def test_each_width_is_learned_on_its_own() -> None:
    """The curve is that of one request: drafts of several cost more."""
    target = made()
    for _ in range(30):
        target.observe(8, 8, 4e-3)
        target.observe(8, 40, 20e-3)
    assert target.seconds(8, 8) == pytest.approx(4e-3, rel=0.05)
    assert target.seconds(8, 40) == pytest.approx(20e-3, rel=0.05)
    assert target.seconds(1, 1) != pytest.approx(2e-3), "batch sizes never seen take the nearest one's"
    for _ in range(10):
        target.observe(1, 1, 2e-3)
    assert target.seconds(1, 1) == pytest.approx(2e-3, rel=0.05)


def test_short_windows_count_less() -> None:
    whole, part = made(), made()
    whole.observe(1, 1, 3e-3)
    part.observe(1, 1, 3e-3, weight=0.25)
    assert 2e-3 < part.seconds(1, 1) < whole.seconds(1, 1)


def test_drafting_takes_its_first_measurement_and_then_follows() -> None:
    draft = DraftTime(Settings(), 1e-4)
    assert draft.unit(4) == 1e-4
    draft.observe(1, levels=4, tokens=4, measured=1e-3)
    assert draft.unit(1) == draft.unit(64) == pytest.approx(1e-4)
    for _ in range(60):
        draft.observe(1, levels=2, tokens=2, measured=1.4e-3)
    assert draft.unit(1) == pytest.approx(2e-4, rel=0.05)
    draft.observe(1, levels=2, tokens=2, measured=1.0)
    assert draft.unit(1) < 2.2e-4


def test_reading_is_measured_by_the_token() -> None:
    draft = DraftTime(Settings(), 1e-4)
    draft.observe_reading(200, 1e-3)
    assert draft.per_read == pytest.approx(5e-6)
    draft.observe_reading(200, -1.0)
    assert draft.per_read is not None and 0 < draft.per_read < 5e-6
