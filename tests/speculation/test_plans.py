"""One plan: whether requests draft, how far, and which of their tokens are verified."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from costs.acceptance import LEAST_LATEST, LatestDrafts, MethodAcceptance
from costs.widths import DraftTime, MeasuredCurve, TargetTime
from speculation.control.estimator import MethodEstimate
from speculation.control.plans import Load, Plan, plain_and_best, worth_verifying
from speculation.control.request import Shape

PLAIN = 1e-2
"""Seconds of a step without drafts."""
CURVE = [0.9**position for position in range(1, 9)]
SURE, UNSURE = [0.95] * 8, [0.3, 0.05, 0.01] + [0.0] * 5


def plans(
    survival: list[list[float]],
    num_requests: int = 1,
    row_seconds: float = 0.0,
    load: Load | None = None,
    level_seconds: float = 0.0,
    draft_start: float = 0.0,
    draft_token: float = 0.0,
    shape: Shape = Shape(8),
    found: float = 1.0,
    *,
    is_judged: bool = False,
) -> tuple[Plan, Plan]:
    """Return plans without and with drafts, of which the latest had this `survival`, or one is expected to. A
    drafted row takes `row_seconds`.
    """
    first = PLAIN - (num_requests - 1) * row_seconds
    target = TargetTime(MeasuredCurve((1, 1001), (first, first + 1000 * row_seconds)))
    time = DraftTime(level_seconds, draft_start, draft_token)
    line = survival[0]
    rates = [line[0], *(after / before if before else 0.0 for before, after in pairwise(line))]
    known = MethodEstimate(shape, MethodAcceptance(8, rates), time, LatestDrafts(8))
    known.acceptance.found = found
    if is_judged:
        known.latest.add(np.array(survival * (LEAST_LATEST // len(survival))), 0.0)
    return plain_and_best(target, known, num_requests, load or Load(num_requests, num_requests))


def test_free_rows_are_all_used() -> None:
    _, best = plans([CURVE], 3)
    assert (best.depth, best.load.rows) == (8, 24)
    assert best.load.tokens == pytest.approx(3 + 3 * sum(CURVE))
    assert (best.seconds, best.rate) == pytest.approx((PLAIN, best.load.tokens / PLAIN))


def test_expensive_rows_do_not_pay() -> None:
    plain, best = plans([CURVE], 3, row_seconds=4e-3)
    assert best.rate < plain.rate
    assert (plain.depth, plain.seconds, plain.rate) == pytest.approx((0, PLAIN, 3 / PLAIN))


def test_by_position_all_drafts_have_the_length_that_pays() -> None:
    """Tokens beyond the fifth bring less than the 5 % that each row adds to a step."""
    _, best = plans([[0.9, 0.8, 0.7, 0.6, 0.5, 0.1, 0.05, 0.02]], row_seconds=5e-4)
    assert best.depth == 5
    assert best.load.rows == pytest.approx(5)


def test_by_confidence_unlikely_tokens_are_left_out() -> None:
    _, best = plans([SURE, UNSURE], row_seconds=1e-3, is_judged=True)
    assert 0.3 < best.floor <= 0.95
    assert best.depth == 8
    assert best.load.rows == pytest.approx(4), "half of the drafts, with 8 tokens each"


def test_the_token_that_ends_a_draft_is_paid_for() -> None:
    _, best = plans([SURE, UNSURE], row_seconds=1e-3, draft_token=1.0, level_seconds=1e-5, is_judged=True)
    assert best.load.drafting == pytest.approx(2 * (8 + 1) / 2 * 1e-5)


def test_the_deepest_of_all_drafts_sets_the_levels() -> None:
    """Every second draft is 8 deep: of 4, seldom none is."""
    _, best = plans([SURE, UNSURE], 4, row_seconds=1e-4, level_seconds=1e-6, is_judged=True)
    assert best.load.drafting == pytest.approx((8 - 7 / 16) * 1e-6, rel=0.3)


def test_the_time_of_drafting() -> None:
    """Nothing if no request drafts; else a fixed part, the deepest draft's levels, and all drafts' tokens."""
    load = Load(2, 2, drafting=3e-3)
    plain, best = plans([CURVE], 2, level_seconds=1e-5, draft_start=4.0, draft_token=0.5, load=load)
    assert plain.load.drafting == 3e-3
    assert best.load.drafting == pytest.approx(3e-3 + (4 + 8 + 0.5 * 16) * 1e-5)
    assert best.seconds == pytest.approx(PLAIN + best.load.drafting)


def test_rows_of_other_drafts_count_in_the_step() -> None:
    plain, best = plans([CURVE], 2, row_seconds=1e-3, load=Load(2, 2, rows=10))
    assert plain.load.rows == 10 and plain.seconds == pytest.approx(PLAIN + 10e-3)
    assert best.load.rows == 10 + 2 * best.depth


def test_trees_are_drafted_completely_or_not_at_all() -> None:
    _, best = plans([CURVE], shape=Shape(24, whole=True), row_seconds=5e-5, found=0.5)
    assert (best.depth, best.load.rows) == (24, 12)
    assert best.load.tokens == pytest.approx(1 + 0.5 * sum(CURVE))


def test_drafts_that_bring_nothing() -> None:
    plain, best = plans([[0.0] * 8])
    assert best.rate <= plain.rate


# --- in a step ---------------------------------------------------------------------------------------

SURVIVAL = np.array([[0.9, 0.8, 0.1, 0.0], [0.5, 0.2, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("price", "counts"), [(0.0, [3, 2]), (0.15, [2, 2]), (0.3, [2, 1]), (0.85, [1, 0]), (0.95, [0, 0])]
)
def test_tokens_of_all_requests_compete(price: float, counts: list[int]) -> None:
    assert worth_verifying(SURVIVAL, price * np.arange(9)) == counts


def test_a_first_row_that_is_dear() -> None:
    """As on a CPU, where verification is not the kernel of a plain step."""
    assert worth_verifying(SURVIVAL, np.arange(9) * 0.3 + 1.0 * (np.arange(9) > 0)) == [2, 1]
    assert worth_verifying(SURVIVAL[1:], np.arange(9) * 0.3 + 1.0 * (np.arange(9) > 0)) == [0]
