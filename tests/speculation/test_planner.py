"""One plan: how much each request drafts."""

from __future__ import annotations

import pytest

from costs.drafting import MethodAcceptance, RequestAcceptance
from costs.widths import DraftTime, MeasuredCurve, TargetTime
from speculation.control.controller import Plan, PlannedStep, plain_and_best
from speculation.control.estimator import Estimator, Shape, SpeculatingRequest

PLAIN = 1e-2
"""Seconds of a step without drafts."""


class Batch:
    """Requests of one method, with the times of a drafted row and of one of its levels."""

    def __init__(
        self,
        rates: list[float],
        row_seconds: float = 0.0,
        shape: Shape = Shape(8),
        level_seconds: float = 0.0,
        draft_start: float = 0.0,
        draft_token: float = 0.0,
    ) -> None:
        self.estimator = Estimator(64, 8)
        self.estimator.add_method("eagle", shape, 8, reads_text=False, reads_prompts=False)
        self.known = self.estimator.methods["eagle"]
        self.known.time = DraftTime(level_seconds, draft_start, draft_token)
        first = PLAIN - (len(rates) - 1) * row_seconds
        self.estimator.target = TargetTime(MeasuredCurve((1, 1001), (first, first + 1000 * row_seconds)))
        self.requests = []
        for rate in rates:
            own = MethodAcceptance(8, [rate] * 8)
            self.requests.append(SpeculatingRequest("eagle", None, RequestAcceptance(own)))

    def plans(self, drafted: float = 0.0, drafting: float = 0.0) -> tuple[Plan, Plan]:
        size = len(self.requests)
        return plain_and_best(
            self.estimator, "eagle", self.requests, PlannedStep(size, size, drafted, drafting)
        )

    def best(self) -> Plan:
        return self.plans()[1]


def test_free_rows_are_all_used() -> None:
    best = Batch([0.9] * 3).best()
    assert best.granted == [8, 8, 8]
    assert best.step.drafted == 24
    assert best.step.tokens == pytest.approx(3 + 3 * sum(0.9**i for i in range(1, 9)))
    assert (best.seconds, best.rate) == pytest.approx((PLAIN, best.step.tokens / PLAIN))


def test_expensive_rows_do_not_pay() -> None:
    plain, best = Batch([0.9] * 3, row_seconds=4e-3).plans()
    assert best.rate < plain.rate
    assert plain.granted == [0, 0, 0]
    assert (plain.seconds, plain.rate) == pytest.approx((PLAIN, 3 / PLAIN))


def test_the_likelier_request_drafts_more() -> None:
    best = Batch([0.3, 0.95], row_seconds=1e-3).best()
    assert best.granted[0] < best.granted[1]
    assert best.granted[1] > 2


def test_the_time_of_drafting() -> None:
    """Nothing if no request drafts; else a fixed part, the deepest draft's levels, and all drafts' tokens."""
    batch = Batch([0.95, 0.3], level_seconds=1e-5, draft_start=4.0, draft_token=0.5)
    batch.requests[1].most = 1
    plain, best = batch.plans(drafting=3e-3)
    assert plain.step.drafting == 3e-3
    assert best.granted == [8, 1]
    assert best.step.drafting == pytest.approx(3e-3 + (4 + 8 + 0.5 * 9) * 1e-5)
    assert best.seconds == pytest.approx(PLAIN + best.step.drafting)


def test_rows_of_other_drafts_count_in_the_step() -> None:
    plain, best = Batch([0.9, 0.9], row_seconds=1e-3).plans(drafted=10)
    assert plain.step.drafted == 10
    assert plain.seconds == pytest.approx(PLAIN + 10e-3)
    assert best.step.drafted == 10 + sum(best.granted)


def test_reading_a_text_must_pay() -> None:
    batch = Batch([0.9, 0.9], row_seconds=1e-4)
    batch.requests[1].unread = 1000
    for per_read, drafts in ((2e-3, False), (1e-6, True)):
        batch.known.time.per_read = per_read
        best = batch.best()
        assert best.granted[0] > 0
        assert (best.granted[1] > 0) == drafts


def test_reading_is_shared_among_the_steps_that_follow() -> None:
    """A request that will generate 128 tokens, 9 in each step."""
    batch = Batch([1.0])
    batch.requests[0].unread = 100
    batch.known.time.per_read = 1e-3
    assert batch.best().rate == pytest.approx(9 / (PLAIN + 0.1 * 9 / 128))


def test_trees_are_drafted_completely_or_not_at_all() -> None:
    best = Batch([0.95, 0.05], row_seconds=5e-5, shape=Shape(24, whole=True)).best()
    assert best.granted == [24, 0]
    assert best.step.tokens == pytest.approx(2 + sum(0.95**i for i in range(1, 9)), rel=0.01)


def test_drafts_that_are_rarely_found_cost_few_rows() -> None:
    batch = Batch([0.9], row_seconds=1e-3)
    batch.known.acceptance.found = 0.01
    best = batch.best()
    assert best.granted == [8]
    assert best.step.drafted < 0.1


@pytest.mark.parametrize(("most", "shape", "granted"), [(3, Shape(8), 3), (5, Shape(24, whole=True), 0)])
def test_no_request_exceeds_its_limit(most: int, shape: Shape, granted: int) -> None:
    batch = Batch([0.95], shape=shape)
    batch.requests[0].most = most
    plain, best = batch.plans()
    assert best.granted == [granted]
    assert (best == plain) == (granted == 0)
