"""Acceptance estimates: a method's conditional rates, and corrections for a request's own text."""

from __future__ import annotations

from copy import deepcopy

import pytest

from costs.drafting import FIRST_RATE, TEXT_MEMORY, MethodAcceptance, RequestAcceptance

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
