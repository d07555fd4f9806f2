"""Acceptance of drafts as requests observe it, and the gains that follow."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import msgspec
import pytest

from costs.drafting import (
    FIRST_RATE,
    TEXT_MEMORY,
    MethodAcceptance,
    RequestAcceptance,
    StepCurve,
    local_rate,
    plain_rate,
    remote_rate,
)
from protocol.speculation import MethodState, RequestSpeculation, StepTimeState
from router.placement.drafts import DraftFacts, DraftPlace, Prospects
from tests.router.placed import GPU_LIKE, drafter, speculation, target

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


DEPTH = 4


def method_of(outcomes: list[tuple[int, int]]) -> MethodAcceptance:
    method = MethodAcceptance(DEPTH)
    for depth, num_accepted in outcomes:
        method.observe(depth, num_accepted)
    return method


def request_of(method: MethodAcceptance, outcomes: list[tuple[int, int]] = []) -> RequestAcceptance:  # noqa: B006
    """Make a request of a method that has no others after these."""
    request = RequestAcceptance(deepcopy(method))
    for depth, num_accepted in outcomes:
        request.observe(depth, num_accepted, 0)
    return request


def test_without_observations_the_prior_stands() -> None:
    survival = request_of(method_of([])).survival()
    assert survival == pytest.approx([FIRST_RATE ** (place + 1) for place in range(DEPTH)])


def test_a_class_has_its_own_rates_beside_the_methods() -> None:
    method = method_of([(4, 4)] * 400)
    sampled = MethodAcceptance(DEPTH, method.rates())
    assert sampled.rates() == pytest.approx(method.rates()), "it begins with what is known"
    request = RequestAcceptance(method, sampled)
    for _ in range(40):
        request.observe(4, 0, 0)
    assert sampled.rates()[0] < 0.4 < 0.8 < method.rates()[0]


def test_survival_is_the_product_of_the_conditional_rates() -> None:
    """Position 0 is accepted three times in four; after it position 1 always is, and position 2 never."""
    survival = request_of(method_of([(4, 2), (4, 2), (4, 2), (4, 0)] * 50)).survival()
    assert survival[0] == pytest.approx(0.75, abs=0.02)
    assert survival[1] == pytest.approx(survival[0], rel=0.03)
    assert survival[2] < 0.1
    assert survival == sorted(survival, reverse=True)


def test_positions_after_a_rejected_one_are_not_counted() -> None:
    assert method_of([(4, 0)] * 20).rates() == method_of([(1, 0)] * 20).rates()


def test_old_observations_fade() -> None:
    assert method_of([(4, 4)] * 3000 + [(4, 0)] * 1500).rates()[0] < 0.1


def test_requests_in_hard_and_easy_text_get_different_rates() -> None:
    method = method_of([(4, 4), (4, 1)] * 50)
    typical = request_of(method).survival()
    hard, easy = request_of(method, [(4, 0)] * 3).survival(), request_of(method, [(4, 4)] * 3).survival()
    assert hard[0] < typical[0] < easy[0]
    assert hard[-1] < 0.5 * typical[-1]
    assert all(0 <= chance <= 1 for chance in hard + easy)


def test_a_requests_own_observations_fade() -> None:
    method = method_of([(4, 4), (4, 1)] * 200)
    request = request_of(method, [(4, 0)] * 5)
    request.age(int(6 * TEXT_MEMORY))
    assert request.survival() == pytest.approx(request_of(method).survival(), abs=0.02)


def test_observations_fade_with_the_text_alone() -> None:
    """They do not where a request stays as long, and a request placed again may be shorter."""
    request = request_of(method_of([(4, 4), (4, 1)] * 200), [(4, 0)] * 5)
    before = request.survival()
    for place in (0, 0, -3):
        request.age(place)
        assert request.survival() == before
    for place in range(1000, 1003):
        request.age(place)
        request.observe(4, 0, place)
    assert request._rejected == pytest.approx(sum((1 - 1 / TEXT_MEMORY) ** age for age in range(3)))


def test_a_requests_observations_count_for_its_method() -> None:
    method = MethodAcceptance(DEPTH)
    before = method.rates()
    RequestAcceptance(method).observe(4, 0, 9)
    assert method.rates()[0] < before[0]
    assert method.rates()[1:] == before[1:]


def test_the_share_of_drafts_that_find_a_match() -> None:
    method = MethodAcceptance(DEPTH)
    for _ in range(3000):
        method.observe_found(8, 8)
        method.observe_found(8, 0)
    assert method.found == pytest.approx(0.5, abs=0.02)
