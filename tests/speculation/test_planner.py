"""One plan: which requests draft how much."""

from __future__ import annotations

import pytest

from speculation.control.acceptance import MethodAcceptance, RequestAcceptance
from speculation.control.planner import DraftCost, Shape, SpeculatingRequest, StepCost, add_fixed, best_plan
from speculation.control.settings import Settings

SETTINGS = Settings()
CHAIN = Shape(8)
FREE = DraftCost(0.0, 0.0, 0.0)


def request(rate: float = 0.9, fixed: int | None = None) -> SpeculatingRequest:
    method = MethodAcceptance(8, SETTINGS)
    method._accepted = [rate * tried for tried in method._tried]
    return SpeculatingRequest("draft_model", fixed, RequestAcceptance(method, SETTINGS))


def step(num_requests: int, row_seconds: float, most: int = 512) -> StepCost:
    return StepCost([1e-2 + row_seconds * row for row in range(most + 1)], float(num_requests))


def test_rows_that_cost_nothing_are_all_used() -> None:
    plan = best_plan(CHAIN, FREE, [request() for _ in range(3)], step(3, 0.0))
    assert plan is not None
    assert plan.granted == [8, 8, 8]
    assert plan.step.tokens == pytest.approx(3 + 3 * sum(0.9**i for i in range(1, 9)))


def test_rows_that_cost_too_much_are_hardly_used() -> None:
    plain = step(3, 1e-2)
    plan = best_plan(CHAIN, FREE, [request() for _ in range(3)], plain)
    assert plan is not None and plan.rate < plain.rate


def test_the_likelier_request_drafts_more() -> None:
    plan = best_plan(CHAIN, FREE, [request(0.3), request(0.95)], step(2, 1e-3))
    assert plan is not None
    assert plan.granted[0] < plan.granted[1]
    assert plan.granted[1] > 2


def test_levels_are_paid_for_once_for_all() -> None:
    costly = DraftCost(start=0.0, per_level=2e-3, per_token=0.0)
    alone = best_plan(CHAIN, costly, [request()], step(1, 0.0))
    many = best_plan(CHAIN, costly, [request() for _ in range(8)], step(8, 0.0))
    assert alone is not None and many is not None
    assert alone.granted[0] <= many.granted[0]
    shallow = best_plan(CHAIN, DraftCost(0.0, 2e-2, 0.0), [request()], step(1, 0.0))
    assert shallow is not None and shallow.granted[0] < alone.granted[0]


def test_a_text_that_must_be_read_must_earn_it() -> None:
    near, far = request(), request()
    far.unread = 1000
    dear = DraftCost(0.0, 0.0, 0.0, reading=2e-5)
    plan = best_plan(CHAIN, dear, [near, far], step(2, 1e-4))
    assert plan is not None
    assert plan.granted[0] > 0
    assert plan.granted[1] == 0
    cheap = best_plan(CHAIN, DraftCost(0.0, 0.0, 0.0, reading=1e-7), [near, far], step(2, 1e-4))
    assert cheap is not None and cheap.granted[1] > 0


def test_trees_are_drafted_whole_or_not() -> None:
    plan = best_plan(Shape(24, whole=True), FREE, [request(0.95), request(0.05)], step(2, 5e-5))
    assert plan is not None
    assert plan.granted == [24, 0]
    assert plan.step.tokens == pytest.approx(2 + sum(0.95**i for i in range(1, 9)), rel=0.01)


def test_what_is_seldom_found_costs_few_rows() -> None:
    rare = request()
    for _ in range(5000):
        rare.acceptance.observe_found(8, 0)
    plan = best_plan(CHAIN, FREE, [rare], step(1, 1e-3))
    assert plan is not None
    assert plan.granted == [8]
    assert plan.step.rows < 0.1


def test_no_step_is_larger_than_the_largest() -> None:
    plan = best_plan(CHAIN, FREE, [request() for _ in range(4)], step(4, 0.0, most=10))
    assert plan is not None and sum(plan.granted) == 10
    assert best_plan(CHAIN, FREE, [request()], step(1, 0.0, most=0)) is None


def test_fixed_drafts_are_counted_by_their_chances() -> None:
    fixed = request(fixed=4)
    fixed.granted = 4
    made = add_fixed(CHAIN, DraftCost(1e-3, 1e-4, 1e-5), [fixed], step(2, 1e-4))
    assert made.tokens == pytest.approx(2 + sum(0.9**i for i in range(1, 5)))
    assert made.rows == 4
    assert made.drafting == pytest.approx(1e-3 + 4e-4 + 4e-5)
