"""The planner's verdicts on drafts, compared with the closed form."""

from __future__ import annotations

import pytest

from planner.command import draft_choices, last_paying
from protocol.speculation import MethodState, SpeculationState, StepTimeState


def known(fixed: float, per_row: float, acceptance: float = 0.8, tokens: int = 4) -> SpeculationState:
    """Return costs of steps of `fixed + per_row * rows` seconds with drafts that take no time."""
    sequences, drafted = [1, 1024], [0, 4]
    seconds = [[fixed + per_row * count * (1 + each) for each in drafted] for count in sequences]
    return SpeculationState(
        max_tokens=tokens,
        methods=[MethodState(method="eagle", acceptance=[acceptance] * 4)],
        step_time=StepTimeState(sequences=sequences, drafted=drafted, seconds=seconds),
    )


@pytest.mark.parametrize("ratio", [10.0, 133.0])
def test_a_single_drafted_token_pays_up_to_the_crossover(ratio):
    """With K = 1, drafts pay below `ratio * (tau - 1) / (K + 1 - tau)` requests, here 4 times the ratio.

    They count as paying up to a gain of 3 %: (1 + a) (r + B) = 1.03 (r + 2 B).
    """
    choices = draft_choices(known(ratio * 1e-4, 1e-4, tokens=1), range(1, 1024))
    assert last_paying(choices) == int(ratio * (1.8 - 1.03) / (2 * 1.03 - 1.8))
    faster = [choice.rows for choice in choices if choice.speedup > 1]
    assert faster[-1] == pytest.approx(4 * ratio, abs=1)


def test_fewer_tokens_are_drafted_as_the_load_grows():
    choices = draft_choices(known(133e-4, 1e-4), range(1, 1024))
    counts = [choice.num_tokens for choice in choices]
    assert counts[0] == 4 and counts[-1] == 0 and counts == sorted(counts, reverse=True)
    tau = 1 + 0.8 + 0.64 + 0.512 + 0.4096
    assert choices[0].speedup == pytest.approx(tau * 134 / 138)


def test_no_drafts_pay_if_no_token_is_accepted():
    choices = draft_choices(known(1.0, 0.01, acceptance=0.0), [1, 8])
    assert [choice.num_tokens for choice in choices] == [0, 0] and last_paying(choices) == 0
