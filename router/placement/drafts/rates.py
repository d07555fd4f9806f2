"""Tokens a second that a decode worker is expected to bring, by where and how far its requests draft.

With B requests, K drafted tokens and the chance S(i) that token i is accepted with all before it, a draft
brings tau = 1 + S(1) + ... + S(K) tokens. A step with y drafted tokens for each request takes T(y).

- Nowhere: B / T(0).
- On the decode worker: B tau / (T(K) + drafting).
- On a draft worker, which is up to 2 K + 1 tokens ahead: each of its steps drafts for all of its requests,
  a token or some. Those whose draft has not come yet are decoded without. What the target contradicts is
  drafted anew, once it is known: so it is a run of steps, up to the next contradiction, that is added up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from protocol.speculation import MethodState, StepTimeState
from router.placement.drafts.interface import DraftTarget, SharedDrafter

_ROUNDS = 3
"""Of computing a step's time from the drafts in it, and those from the step's time."""
_LEAST_CHANCE, _MOST_STEPS = 0.02, 64.0
"""Where a run's sums are cut off."""


class Rate(NamedTuple):
    """Of a batch, and what a step brings to each of its requests."""

    tokens_per_s: float
    tokens_per_step: float


class StepCurve:
    """Seconds of a target's step, by how many drafted tokens each of its requests verifies."""

    def __init__(self, target: DraftTarget) -> None:
        rows, known = target.rows, target.speculation
        table = known.step_time if known is not None else StepTimeState()
        if _is_whole(table):
            columns = zip(*table.seconds, strict=True)
            self._drafted: Sequence[float] = table.drafted
            self._seconds = [_interpolate(table.sequences, column, rows) for column in columns]
        else:
            self._drafted = (0, 1)
            costs, context = target.costs, target.context_tokens
            self._seconds = [costs.decode_s(rows, context), costs.decode_s(2 * rows, context)]

    def seconds(self, drafted: float) -> float:
        return max(_interpolate(self._drafted, self._seconds, drafted), 1e-9)


def plain_rate(rows: float, curve: StepCurve) -> Rate:
    return Rate(rows / curve.seconds(0), 1.0)


def local_rate(
    rows: float, curve: StepCurve, state: MethodState, chances: Sequence[float], drafted: int, levels: int
) -> Rate:
    """With drafts of `drafted` tokens, `levels` after one another, where the decode worker finds one."""
    tokens = 1 + state.found * sum(chances)
    drafting_s = state.start_s + state.level_s * levels + state.token_s * rows * drafted
    return Rate(rows * tokens / (curve.seconds(state.found * drafted) + drafting_s), tokens)


def remote_rate(rows: float, curve: StepCurve, chances: Sequence[float], drafter: SharedDrafter) -> Rate:
    """With drafts of up to `len(chances)` tokens by a draft worker, for all of the batch."""
    seconds, share, run = curve.seconds(0), 1.0, _Run()
    for _ in range(_ROUNDS):
        step_s = max(draft_step_seconds(drafter, rows * share), 1e-9)
        token_s = step_s / max(drafter.costs.tokens_per_row, 1.0)
        # Half a step until it hears of a contradiction, if it is at work, and half until its draft is heard.
        late_s = max(drafter.answer_s - seconds - step_s, 0.0) + step_s * (1 + share) / 2
        run = _run(chances, seconds / token_s, late_s / seconds)
        seconds = curve.seconds(run.verified)
        share = min(run.drafted * token_s / seconds, 1.0)
    return Rate(rows * run.tokens / seconds, run.tokens)


def draft_step_seconds(drafter: SharedDrafter, rows: float) -> float:
    """Of a draft worker's step, which drafts for all of its rows, beside a text that is read."""
    costs, drafting = drafter.costs, drafter.others + rows
    reading_s = costs.chunks_s(min(drafter.waiting_tokens, costs.chunk_tokens), 0, costs.chunk_tokens)
    return costs.decode_s(drafting, drafting * drafter.context_tokens) + reading_s


def reading_seconds(drafter: SharedDrafter, num_tokens: int) -> float:
    """Until a draft worker has read so many tokens of a text, after those that wait there."""
    costs = drafter.costs
    return costs.chunks_s(drafter.waiting_tokens + num_tokens, 0, costs.chunk_tokens)


class _Run(NamedTuple):
    """What one request's steps bring on average, from one contradicted draft to the next: `tokens`, of which
    the target has `verified` so many drafted ones; the draft worker has `drafted` more.
    """

    tokens: float = 1.0
    verified: float = 0.0
    drafted: float = 0.0


def _run(chances: Sequence[float], pace: float, late: float) -> _Run:
    """A draft worker that drafts `pace` tokens in a step of its target, and begins `late` steps after it was
    contradicted.

    It goes on while all that was verified is accepted, and what the target adds to it is what was drafted:
    then the rest of the draft is of use in the next step.
    """
    longest, each = len(chances), chances[-1] ** (1 / len(chances))
    chance = 1.0
    steps = tokens = verified = drafted = 0.0
    waits = int(min(late, _MOST_STEPS)) if late > 0 else 0
    for _ in range(waits):  # a draft that comes so late must agree with the tokens of these steps
        steps += chance
        tokens += chance
        chance *= each
    ahead, made = 0.0, pace * max(1 - late + waits, 0.0)
    while chance > _LEAST_CHANCE and steps < _MOST_STEPS:
        now = min(ahead, longest)
        whole, rest = int(now), now - int(now)
        survives = chances[whole - 1] if whole else 1.0
        reaches = chances[whole] if rest else 0.0
        most = max(2 * longest + 1 - waits * (now + 1), now + 1)
        after = max(min(ahead + made, most), ahead)
        goes_on = (survives + rest * (reaches - survives)) * each * min(max(after - now, 0.0), 1.0)
        left = max(after - now - 1, 0.0)
        # Once as far ahead as before, all steps are like this one.
        weight = chance / (1 - goes_on) if abs(left - ahead) < 1e-3 and goes_on < 1 else chance
        steps += weight
        verified += weight * now
        tokens += weight * (1 + sum(chances[:whole]) + rest * reaches)
        drafted += weight * (after - ahead)
        if weight > chance:
            break
        ahead, chance, made = left, chance * goes_on, pace
    return _Run(tokens / steps, verified / steps, drafted / steps)


def _is_whole(table: StepTimeState) -> bool:
    widths = {len(row) for row in table.seconds}
    return (
        bool(table.sequences and table.drafted)
        and len(table.seconds) == len(table.sequences)
        and widths == {len(table.drafted)}
        and all(isfinite(value) and value > 0 for row in table.seconds for value in row)
    )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear, and straight on behind the end."""
    if len(xs) < 2:
        return ys[0]
    above = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    width = xs[above] - xs[above - 1]
    if width <= 0:
        return ys[above]
    slope = (ys[above] - ys[above - 1]) / width
    return ys[above] + (x - xs[above]) * slope
