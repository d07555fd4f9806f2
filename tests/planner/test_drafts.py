"""Whether drafts pay, against the closed form of when they do."""

from __future__ import annotations

import pytest

from planner.drafts import draft_choices, last_paying, rate, step_seconds
from planner.profile import DraftProfile
from protocol.speculation import MethodState, StepTimeState


def draft(fixed: float, per_row: float, acceptance: float = 0.8, level_s: float = 0.0) -> DraftProfile:
    """Steps of `fixed + per_row * rows` seconds."""
    return DraftProfile(
        method=MethodState(method="eagle", acceptance=[acceptance] * 4, level_s=level_s),
        max_tokens=4,
        step_time=StepTimeState(rows=[1, 8], seconds=[fixed + per_row, fixed + 8 * per_row]),
    )


def test_the_step_goes_on_beyond_what_was_measured():
    assert step_seconds(draft(1.0, 0.5), 4) == pytest.approx(3.0)
    assert step_seconds(draft(1.0, 0.5), 20) == pytest.approx(11.0)


def test_the_rate_is_tokens_over_seconds():
    assert rate(draft(1.0, 0.1), 2, 0) == pytest.approx(2 / 1.2)
    assert rate(draft(1.0, 0.1, level_s=0.5), 2, 2) == pytest.approx(2 * (1 + 0.8 + 0.64) / (1.6 + 1.0))


@pytest.mark.parametrize(("ratio", "end"), [(133.0, 191), (2.0, 2)])
def test_drafting_pays_up_to_the_crossover(ratio, end):
    """With K = 4 below `ratio * (tau - 1) / (K + 1 - tau)` requests; fewer tokens pay a little longer."""
    known = draft(ratio * 1e-4, 1e-4)
    assert rate(known, end, 4) > rate(known, end, 0) and rate(known, end + 1, 4) < rate(known, end + 1, 0)
    choices = draft_choices(known, range(1, 1024))
    assert end <= last_paying(choices) < 4 * end + 4
    assert choices[0].num_tokens >= 3 and choices[-1].num_tokens == 0


def test_nothing_pays_where_no_token_is_accepted():
    choices = draft_choices(draft(1.0, 0.01, acceptance=0.0), [1, 8])
    assert [choice.num_tokens for choice in choices] == [0, 0] and last_paying(choices) == 0
