"""Acceptance by position: conditional rates, a prior from the method, and forgetting."""

from __future__ import annotations

import pytest

from speculation.control.acceptance import FIRST_GUESS, Acceptance, MethodAcceptance

DEPTH = 4


def shown(outcomes: list[tuple[int, int]], method: MethodAcceptance | None = None) -> Acceptance:
    acceptance = Acceptance(method or MethodAcceptance(DEPTH))
    for place, (num_drafted, num_accepted) in enumerate(outcomes):
        acceptance.observe(num_drafted, num_accepted, place)
    return acceptance


def test_before_anything_is_known_the_guess_stands() -> None:
    survival = shown([]).survival()
    assert survival == pytest.approx([FIRST_GUESS ** (position + 1) for position in range(DEPTH)])


def test_survival_is_the_product_of_the_conditional_rates() -> None:
    """Position 0 is accepted three times in four; where it is, position 1 always is, and position 2 never."""
    survival = shown([(4, 2), (4, 2), (4, 2), (4, 0)] * 50).survival()
    assert survival[0] == pytest.approx(0.75, abs=0.05)
    assert survival[1] == pytest.approx(survival[0], rel=0.05)
    assert survival[2] < 0.1
    assert survival == sorted(survival, reverse=True)


def test_a_position_behind_a_rejected_one_is_not_blamed() -> None:
    never, short = shown([(4, 0)] * 20), shown([(1, 0)] * 20)
    assert never.survival() == short.survival()


def test_depth_that_was_not_drafted_is_judged_by_what_was() -> None:
    easy, hard = shown([(1, 1)] * 40), shown([(1, 0), (1, 1)] * 20)
    ahead = [one.survival()[1] / one.survival()[0] for one in (easy, hard)]
    assert ahead[0] > ahead[1]


def test_a_new_request_starts_from_its_methods_rates() -> None:
    method = MethodAcceptance(DEPTH)
    shown([(4, 4)] * 400, method)
    assert Acceptance(method).survival()[0] > 0.95
    assert method.rates()[0] > 0.95


def test_a_waiting_request_hears_what_the_others_show() -> None:
    method = MethodAcceptance(DEPTH)
    waiting = Acceptance(method)
    before = waiting.survival()[0]
    shown([(4, 0)] * 400, method)
    assert waiting.survival()[0] < before / 2


def test_its_own_drafts_outweigh_the_methods() -> None:
    method = MethodAcceptance(DEPTH)
    shown([(4, 4)] * 400, method)
    assert shown([(4, 0)] * 20, method).survival()[0] < 0.25


def test_what_was_learned_long_ago_in_the_text_counts_less() -> None:
    def after(gap: int) -> float:
        acceptance = shown([(4, 0)] * 30)
        acceptance.observe(4, 4, 30 + gap)
        return acceptance.survival()[0]

    assert after(500) > after(50) > after(1)


def test_text_that_was_hard_is_not_taken_to_stay_so() -> None:
    """Although a request that does not draft learns nothing new."""
    method = MethodAcceptance(DEPTH)
    shown([(4, 4)] * 400, method)
    acceptance = shown([(4, 0)] * 20, method)
    hard = acceptance.survival()[0]
    acceptance.grow(21)
    assert acceptance.survival()[0] == hard
    for place in range(40, 340, 20):
        acceptance.grow(place)
    assert hard < 0.3
    assert acceptance.survival() == pytest.approx(Acceptance(method).survival(), rel=0.01)


def test_a_blind_draft_tells_only_of_its_own_request() -> None:
    method = MethodAcceptance(4)
    blind, other = Acceptance(method), Acceptance(method)
    for place in range(20):
        blind.observe(4, 0, place, is_blind=True)
    assert blind.survival()[0] < 0.2
    assert other.survival()[0] == pytest.approx(FIRST_GUESS)


def test_the_share_of_what_is_found() -> None:
    method = MethodAcceptance(DEPTH)
    acceptance = Acceptance(method)
    assert acceptance.share == 1.0
    for _ in range(200):
        acceptance.observe_share(4, 0)
        acceptance.observe_share(4, 4)
    assert acceptance.share == pytest.approx(0.5, abs=0.05)
    assert method.share < 1.0
    assert Acceptance(method).share == pytest.approx(method.share)


def test_drafts_deeper_than_what_is_kept_do_no_harm() -> None:
    assert len(shown([(32, 32), (32, 7)]).survival()) == DEPTH
    assert Acceptance(MethodAcceptance(0)).survival() == []
