"""Acceptance rates by position, and the acceptance of tokens by the drafter's confidence in them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from costs.acceptance import FIRST_RATE, LEAST_LATEST, Calibration, LatestDrafts, MethodAcceptance

DEPTH = 4


def method_of(outcomes: list[tuple[int, int]]) -> MethodAcceptance:
    method = MethodAcceptance(DEPTH)
    for depth, num_accepted in outcomes:
        method.observe(depth, num_accepted)
    return method


def test_rates_are_conditional() -> None:
    """Position 0 is accepted three times in four. After an accepted position 0, position 1 always is, and
    position 2 never.
    """
    rates = method_of([(4, 2), (4, 2), (4, 2), (4, 0)] * 50).rates()
    assert rates[:2] == pytest.approx([0.75, 1.0], abs=0.03)
    assert rates[2] < 0.15 and rates[3] == FIRST_RATE


def test_positions_after_a_rejected_one_are_not_counted() -> None:
    assert method_of([(4, 0)] * 20).rates() == method_of([(1, 0)] * 20).rates()


def test_old_observations_fade() -> None:
    assert method_of([(4, 4)] * 3000 + [(4, 0)] * 1500).rates()[0] < 0.1


def test_a_dropped_token_counts_as_its_confidence_says() -> None:
    """Otherwise a position's rate would be that of its surest tokens."""
    method = method_of([])
    for _ in range(1000):
        method.observe(1, 1)
        method.observe(0, 0, dropped=0.2)
    assert method.rates()[0] == pytest.approx(0.6, abs=0.03)


def test_the_share_of_drafts_that_find_a_match() -> None:
    method = MethodAcceptance(DEPTH)
    for _ in range(3000):
        method.observe_found(is_found=True)
        method.observe_found(is_found=False)
    assert method.found == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("offset", "slope"), [(0.0, 1.0), (-1.0, 0.4), (1.5, 2.0)])
def test_confidences_are_calibrated(offset: float, slope: float) -> None:
    """Whatever a drafter's log-odds are worth."""
    made, chance = Calibration(), random.Random(5)
    for _ in range(6000):
        confidence = chance.gauss(1.0, 2.0)
        accepted = chance.random() < 1 / (1 + math.exp(-(offset + slope * confidence)))
        made.observe([confidence], int(accepted))
    for confidence in (-2.0, 0.0, 2.0):
        wanted = 1 / (1 + math.exp(-(offset + slope * confidence)))
        assert made.rate(confidence) == pytest.approx(wanted, abs=0.1)


def test_survival_is_the_product_of_the_rates() -> None:
    made = Calibration()
    made.offset, made.slope = 0.3, 0.8
    (line,) = made.survival(np.array([[1.0, -0.5, 40.0, -np.inf]]))
    first, second, surest = (made.rate(each) for each in (1.0, -0.5, 40.0))
    assert line == pytest.approx([first, first * second, first * second * surest, 0.0])


def test_what_lies_behind_a_drafts_end() -> None:
    """Nothing, unless it ended since its last token was unsure: then it falls by the rates of positions."""
    latest = LatestDrafts(DEPTH)
    survival = np.array([[0.9, 0.4, 0.0, 0.0], [0.9, 0.6, 0.0, 0.0], [0.0] * 4, [0.9, 0.8, 0.7, 0.4]])
    for _ in range(LEAST_LATEST // 4):
        assert not latest.are_known
        latest.add(survival, 0.5)
    assert latest.are_known
    found = latest.survival([0.5, 0.5, 0.5, 0.2])[:4]
    assert found[0] == pytest.approx([0.9, 0.4, 0.2, 0.04])
    assert (found[1:] == survival[1:]).all()
