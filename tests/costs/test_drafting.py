"""Predicted gains of drafts, checked against formulas written out by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from costs.drafting import StepCurve, local_rate, plain_rate, remote_rate
from protocol.speculation import MethodState, RequestSpeculation, StepTimeState
from router.placement.drafts import DraftFacts, DraftPlace, Prospects
from tests.router.drafted import GPU_LIKE, drafter, speculation, target

CHANCES = [0.5, 0.25]
CURVE = StepCurve(4, speculation(20e-3, 1e-3).step_time)
"""A step of 4 requests: 24 ms, and 4 ms more for each token that all of them verify."""


def test_without_drafts_each_step_brings_a_token_to_each_request():
    assert plain_rate(4, CURVE) == pytest.approx((4 / 24e-3, 1.0))


def test_local_drafts_add_time_between_steps():
    state = MethodState(method="ngram", start_s=1e-3, level_s=2e-3, token_s=0.5e-3, found=0.5)
    tokens = 1 + 0.5 * 0.75
    seconds = (24e-3 + 0.5 * 2 * 4e-3) + 1e-3 + 2 * 2e-3 + 0.5e-3 * 4 * 2
    assert local_rate(4, CURVE, state, CHANCES, 2, levels=2) == pytest.approx((4 * tokens / seconds, tokens))


@pytest.mark.parametrize(
    ("changes", "per_row", "plain_steps"),
    [
        # With chance 1/8 the draft continues. Otherwise it starts again after a step, whose token agrees half
        # of the time.
        ({}, 1.0, 7 / 8 * 1 / 0.5),
        ({"others": 4}, 1.0, 7 / 8 * 1 / 0.5),
        # A draft of 3 tokens takes 1.5 steps and one of 2 tokens takes 1, so half a step or one is missing.
        ({"step_s": 12e-3}, 1.0, 1 / 8 * 0.5 + 7 / 8 * 1 / 0.5),
        # The draft worker hears of the token after 24 ms, and has the second drafted token 1 ms later.
        ({"answer_s": 47e-3}, 1.0, 7 / 8 * 1 / 0.5),
        ({"answer_s": 71e-3}, 1.0, 7 / 8 * 2 / 0.25),
        # The draft worker drafts two tokens in each of its steps.
        ({"step_s": 16e-3}, 2.0, 7 / 8 * 1 / 0.5),
    ],
)
def test_remote_drafts_arrive_in_time_for_some_steps(changes, per_row, plain_steps):
    shared = drafter(**{"step_s": 1e-3, "row_s": 0.0} | changes)
    shared = replace(shared, costs=msgspec.structs.replace(shared.costs, tokens_per_row=per_row))
    share = 1 / (1 + plain_steps)
    tokens, seconds = 1 + share * 0.75, 24e-3 + share * 2 * 4e-3
    assert remote_rate(4, CURVE, CHANCES, shared) == pytest.approx((4 * tokens / seconds, tokens))


def test_a_draft_workers_step_has_the_rows_of_all_its_targets():
    few, many = (
        remote_rate(4, CURVE, CHANCES, drafter(step_s=1e-3, row_s=1e-3, others=others)).tokens_per_step
        for others in (0, 40)
    )
    assert many < few


@pytest.mark.parametrize(
    "table",
    [
        StepTimeState(),
        StepTimeState(sequences=[1, 2], drafted=[0, 1], seconds=[[1.0, 2.0]]),
        StepTimeState(sequences=[1, 2], drafted=[0, 1], seconds=[[1.0, 2.0], [1.0]]),
        StepTimeState(sequences=[1, 1], drafted=[0, 1], seconds=[[1.0, 2.0], [1.0, 2.0]]),
        StepTimeState(sequences=[1, 2, 2], drafted=[0, 1], seconds=3 * [[1.0, 2.0]]),
        StepTimeState(sequences=[1, 2], drafted=[1, 0], seconds=[[1.0, 2.0], [1.0, 2.0]]),
        StepTimeState(sequences=[1, 2], drafted=[0, 1], seconds=[[1.0, 2.0], [1.0, float("nan")]]),
        StepTimeState(sequences=[1, 2], drafted=[0, 1], seconds=[[1.0, 2.0], [0.0, 2.0]]),
    ],
)
def test_implausible_step_curves_are_replaced_by_step_costs(table):
    costs = drafter(step_s=3e-3, row_s=1e-3).costs
    curve = StepCurve(1, table, costs)
    assert [curve.seconds(0), curve.seconds(1)] == pytest.approx([4e-3, 5e-3])


def test_a_fixed_number_is_drafted_whether_it_pays_or_not():
    at = target(64, model=GPU_LIKE | {"rate": 0.5}, fixed_tokens=8)
    for option in (Prospects(at).local(DraftFacts()), *Prospects(at, [drafter()]).elsewhere(DraftFacts())):
        assert option is not None and option.max_tokens == 8
    assert Prospects(at).local(DraftFacts()).tokens_per_step == pytest.approx(sum(0.5**i for i in range(9)))


def test_a_tree_takes_one_level():
    known = msgspec.structs.replace(speculation(level_s=1.0, token_s=0.0), max_tokens=24)
    option = Prospects(target(1, speculation=known, fixed_tokens=24)).local(DraftFacts())
    assert option is not None
    assert 1.0 < option.tokens_per_step / option.rate < 1.1


def test_a_worker_without_draft_weights_uses_a_method_that_needs_none():
    asked = RequestSpeculation(method="ngram")
    option = Prospects(target(1, drafts_itself=False), asked=asked).local(DraftFacts())
    assert option is not None and (option.place, option.max_tokens) == (DraftPlace("ngram"), 63)


def test_a_request_runs_without_drafts_until_its_text_is_read():
    shared = drafter()
    prospects = Prospects(target(4), [shared])
    plain, (drafting,) = prospects.nowhere(DraftFacts()).rate, prospects.elsewhere(DraftFacts())
    answer_s = 100 / (drafting.rate / 4)
    half = DraftFacts(num_tokens=round(answer_s / 2 / shared.costs.token_s), tokens_left=100)
    (option,) = prospects.elsewhere(half)
    assert option.worth == pytest.approx((drafting.rate + plain) / 2, rel=0.01)
    assert option.rate == drafting.rate


def test_rates_of_the_draft_model_do_not_carry_over_to_an_untried_method():
    known, asked = speculation(rate=0.02), RequestSpeculation(method="ngram")
    option = Prospects(target(1, speculation=known), asked=asked).local(DraftFacts())
    assert option is not None and option.tokens_per_step > 2
