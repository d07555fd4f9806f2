"""Predicts the tokens a second of a decode worker's batch, by the place where its drafts are made.

Token i of a draft is accepted, together with all before it, with the chance S(i). So a step that verifies K
drafted tokens brings tau = 1 + S(1) + ... + S(K) tokens to its request. With B requests it takes T(K)
seconds.

- Without drafts: B / T(0).
- On the decode worker, which drafts between its steps: B tau / (T(K) + drafting).
- On a draft worker, which drafts while the decode worker computes. Only the share x of a request's steps
  finds a draft: B (1 + x (tau - 1)) / T(x K).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.speculation import Method, MethodState, StepTimeState


@dataclass(frozen=True, slots=True)
class SharedDrafter:
    """A draft worker, as one target sees it.

    It drafts with `method` for `others` requests of other targets, with `context_tokens` each, and has
    `waiting_tokens` of texts to read. A target that sends it a message between two steps has the answer,
    between two steps, after `answer_s`; 0: not measured.
    """

    worker_id: str
    method: Method
    costs: StepCosts = UNKNOWN_COSTS
    others: float = 0.0
    context_tokens: float = 0.0
    waiting_tokens: float = 0.0
    answer_s: float = 0.0


MIN_GAIN = 0.03
"""[share] Drafting must be faster by so much: about the uncertainty of a step's time."""


class Rate(NamedTuple):
    """The rate of a batch, and the tokens that a step brings to each of its requests."""

    tokens_per_s: float
    tokens_per_step: float


class StepCurve:
    """Seconds of a target's step, by the number of drafted tokens that each of its requests verifies."""

    def __init__(
        self,
        rows: float,
        table: StepTimeState,
        costs: StepCosts = UNKNOWN_COSTS,
        context_tokens: float = 0.0,
    ) -> None:
        """`costs` count if the worker reports no sound table of times."""
        if _is_sound(table):
            columns = zip(*table.seconds, strict=True)
            self._drafted: Sequence[float] = table.drafted
            self._seconds = [_interpolate(table.sequences, column, rows) for column in columns]
        else:
            self._drafted = (0, 1)
            self._seconds = [costs.decode_s(count * rows, context_tokens) for count in (1, 2)]

    def seconds(self, drafted: float) -> float:
        return max(_interpolate(self._drafted, self._seconds, drafted), 1e-9)


def plain_rate(rows: float, curve: StepCurve) -> Rate:
    return Rate(rows / curve.seconds(0), 1.0)


def local_rate(
    rows: float, curve: StepCurve, state: MethodState, chances: Sequence[float], drafted: int, levels: int
) -> Rate:
    """Predict the rate with drafts of `drafted` tokens, made in `levels` sequential passes, if the decode
    worker finds a draft.
    """
    tokens = 1 + state.found * sum(chances)
    drafting_s = state.start_s + state.level_s * levels + state.token_s * rows * drafted
    return Rate(rows * tokens / (curve.seconds(state.found * drafted) + drafting_s), tokens)


def remote_rate(rows: float, curve: StepCurve, chances: Sequence[float], drafter: SharedDrafter) -> Rate:
    """Predict the rate with drafts of `len(chances)` tokens that a draft worker makes for the whole batch."""
    drafted, step_s = len(chances), curve.seconds(0)
    share = 1 / (1 + _steps_without(chances, step_s, drafter, rows))
    tokens = 1 + share * sum(chances)
    return Rate(rows * tokens / curve.seconds(share * drafted), tokens)


def _steps_without(chances: Sequence[float], step_s: float, drafter: SharedDrafter, rows: float) -> float:
    """Return how many steps find no draft for each step that finds one.

    If the target accepts a whole draft and its next token is the one that was drafted next, the draft worker
    is ahead already, and the next draft arrives after the steps that it takes to make. Otherwise the draft
    worker is notified and starts over. The tokens that the target adds until the new draft arrives must
    agree with it, too.
    """
    drafted = len(chances)
    draft_step_s = _draft_step_seconds(drafter, rows)
    token_s = draft_step_s / max(drafter.costs.tokens_per_row, 1.0)
    agrees = chances[-1] ** (1 / drafted)
    goes_on = chances[-1] * agrees
    lag_steps = max((drafted + 1) * token_s / step_s - 1, 0.0)
    notice_s = max(drafter.answer_s - step_s, draft_step_s)
    restart_steps = max((notice_s + (drafted - 1) * token_s) / step_s, 1.0)
    return goes_on * lag_steps + (1 - goes_on) * restart_steps / max(agrees**restart_steps, 1e-9)


def _draft_step_seconds(drafter: SharedDrafter, rows: float) -> float:
    """Return the seconds of a draft worker's step for these rows and those of its other targets."""
    drafting = drafter.others + rows
    return drafter.costs.decode_s(drafting, drafting * drafter.context_tokens)


def reading_seconds(drafter: SharedDrafter, num_tokens: int) -> float:
    """Return the time until a draft worker has read `num_tokens` of a text, after the tokens that wait
    there.
    """
    costs = drafter.costs
    return costs.chunks_s(drafter.waiting_tokens + num_tokens, 0, costs.chunk_tokens)


def _is_sound(table: StepTimeState) -> bool:
    """Return whether the table has positive seconds for each pair of its axes, and the axes ascend."""
    axes = table.sequences, table.drafted
    return (
        all(axis and all(a < b for a, b in pairwise(axis)) for axis in axes)
        and [len(row) for row in table.seconds] == [len(table.drafted)] * len(table.sequences)
        and all(isfinite(value) and value > 0 for row in table.seconds for value in row)
    )


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly, and extrapolate linearly beyond the ends."""
    if len(xs) < 2:
        return ys[0]
    above = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[above] - ys[above - 1]) / (xs[above] - xs[above - 1])
    return ys[above] + (x - xs[above]) * slope
