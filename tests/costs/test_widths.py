"""Step times by width, a measured curve that steps correct, and the bound of chunks that follows from it."""

from __future__ import annotations

import random

import pytest

from costs.steps import ChunkBound
from costs.widths import DraftTime, MeasuredCurve, TargetTime
from protocol.costs import StepCosts

CURVE = MeasuredCurve(rows=(1, 4, 16, 64), seconds=(2e-3, 3e-3, 5e-3, 13e-3))


def made() -> TargetTime:
    return TargetTime(CURVE)


def seconds(target: TargetTime, num_sequences: int, drafted: float) -> float:
    return float(target.seconds(num_sequences, [drafted])[0])


def test_the_curve_is_interpolated_and_continued() -> None:
    target = made()
    assert target.seconds(1, [0, 3, 9, 111]) == pytest.approx([2e-3, 3e-3, 4e-3, 21e-3])


def test_a_noisy_measurement_leaves_no_dent() -> None:
    target = TargetTime(MeasuredCurve((1, 2, 4, 8), (9e-3, 2e-3, 3e-3, 4e-3)))
    assert seconds(target, 1, 0) == pytest.approx(2e-3)


def test_one_slow_window_moves_little() -> None:
    target = made()
    for _ in range(20):
        target.observe(1, 4, 3.2e-3)
    before = seconds(target, 1, 4)
    target.observe(1, 4, 320e-3)
    assert seconds(target, 1, 4) < 1.06 * before


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_curve_measured_on_a_busy_machine_is_corrected(factor: float) -> None:
    target, noise = made(), random.Random(3)
    for _ in range(12):
        target.observe(2, 0, factor * seconds(made(), 2, 0) * noise.lognormvariate(0, 0.05))
    for drafted in (0, 4, 16):
        assert seconds(target, 2, drafted) == pytest.approx(factor * seconds(made(), 2, drafted), rel=0.1)


def test_each_width_is_learned_on_its_own() -> None:
    """The curve was measured with one request. Drafts of several requests cost more."""
    target = made()
    for _ in range(30):
        target.observe(8, 0, 4e-3)
        target.observe(8, 32, 20e-3)
    assert seconds(target, 8, 0) == pytest.approx(4e-3, rel=0.05)
    assert seconds(target, 8, 32) == pytest.approx(20e-3, rel=0.05)
    assert seconds(target, 1, 0) != pytest.approx(2e-3), "batch sizes never seen take the nearest one's"
    for _ in range(10):
        target.observe(1, 0, 2e-3)
    assert seconds(target, 1, 0) == pytest.approx(2e-3, rel=0.05)


def test_a_width_that_was_seen_follows_no_other() -> None:
    target = made()
    target.observe(8, 0, 4e-3)
    target.observe(8, 56, 90e-3)
    assert seconds(target, 8, 0) == pytest.approx(4e-3)
    assert seconds(target, 8, 24) > 1.2 * seconds(made(), 8, 24), "the unseen one between them follows both"


def test_drafting_takes_its_first_measurement_and_then_follows() -> None:
    draft = DraftTime(1e-4)
    assert draft.unit(4) == 1e-4
    draft.observe(1, levels=4, tokens=4, measured=1e-3)
    assert draft.unit(1) == draft.unit(64) == pytest.approx(1e-4)
    for _ in range(60):
        draft.observe(1, levels=2, tokens=2, measured=1.4e-3)
    assert draft.unit(1) == pytest.approx(2e-4, rel=0.05)
    draft.observe(1, levels=2, tokens=2, measured=1.0)
    assert draft.unit(1) < 2.2e-4, "a pause of the machine moves it little"
    draft.observe(4, levels=2, tokens=2, measured=2.1e-3)
    assert (draft.unit(1), draft.unit(64)) == pytest.approx((2e-4, 3e-4), rel=0.1), "each size has its own"


def test_reading_time_is_measured_per_token() -> None:
    draft = DraftTime(1e-4)
    draft.observe_reading(200, 1e-3)
    assert draft.per_read == pytest.approx(5e-6)
    draft.observe_reading(200, -1.0)
    assert draft.per_read is not None and 0 < draft.per_read < 5e-6


COSTS = StepCosts(step_s=2e-3, row_s=1e-3, context_s=0.0, chunk_s=1e-3, token_s=1e-4, attention_s=1e-7)


def bound(budget_s: float) -> ChunkBound:
    return ChunkBound(lambda: COSTS, budget_s, 16)


def test_a_step_keeps_within_its_budget():
    chunks = bound(0.05)
    chunks.begin(rows=8, context=0)
    for before in (0, 1000):
        chunks.begin(rows=8, context=0)
        count = chunks.tokens(512, before)
        assert COSTS.decode_s(8, 0) + COSTS.chunks_s(count, before, 512) == pytest.approx(0.05, rel=0.01)
        assert chunks.is_full and chunks.tokens(512, 0) == 0


def test_a_smaller_bound_that_a_request_asks_for_applies():
    chunks = bound(0.05)
    for slo_tpot_s, seconds in ((0.03, 0.024), (0.05, 0.04), (0.0625, 0.05), (1.0, 0.05)):
        chunks.begin(8, 0, slo_tpot_s)
        count = chunks.tokens(512, 0)
        assert COSTS.decode_s(8, 0) + COSTS.chunks_s(count, 0, 512) == pytest.approx(seconds, rel=0.01)
    without = bound(0.0)
    without.begin(8, 0, 0.03)
    assert without.tokens(512, 0) == 512, "the operator wants no bound"


def test_small_prompts_share_a_step():
    chunks = bound(0.05)
    chunks.begin(rows=8, context=0)
    first, second, third = (chunks.tokens(150, 0) for _ in range(3))
    assert (first, second) == (150, 150) and 16 <= third < 150
    assert chunks.is_full


def test_there_is_no_bound_without_budget_or_without_decoding():
    for chunks, rows in ((bound(0.0), 8), (bound(1e-6), 0)):
        chunks.begin(rows=rows, context=0)
        assert chunks.tokens(10_000, 10_000) == 10_000 and not chunks.is_full


def test_prompts_progress_even_if_decoding_alone_exceeds_the_budget():
    chunks = bound(1e-6)
    chunks.begin(rows=8, context=0)
    count = chunks.tokens(512, 0)
    assert COSTS.chunks_s(count, 0, 512) == pytest.approx(COSTS.decode_s(8, 0), rel=0.02)
    chunks.begin(rows=1, context=0)
    assert chunks.tokens(512, 10**7) == 16, "a block, whatever it takes"
