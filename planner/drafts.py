"""Decides whether to speculate, with how many tokens and up to which load, by the router's own formulas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import msgspec

from costs.drafting import MIN_GAIN, StepCurve, local_rate, plain_rate
from protocol.speculation import MethodState, SpeculationState


class DraftChoice(msgspec.Struct, frozen=True):
    """For batches of `rows` requests: the best number of drafted tokens, 0 for none, and its speedup."""

    rows: int
    num_tokens: int
    speedup: float


def draft_choices(known: SpeculationState, rows: Sequence[int]) -> list[DraftChoice]:
    """Return the choices for the first method."""
    return [_choice(known, known.methods[0], each) for each in rows]


def last_paying(choices: Sequence[DraftChoice]) -> int:
    """Return the largest batch for which drafting pays; 0 if it never does."""
    return max((choice.rows for choice in choices if choice.num_tokens), default=0)


def _choice(known: SpeculationState, method: MethodState, rows: int) -> DraftChoice:
    curve = StepCurve(rows, known.step_time)
    chances = list(accumulate(method.acceptance, mul))
    plain = plain_rate(rows, curve).tokens_per_s
    speedups = {
        count: local_rate(rows, curve, method, chances[:count], count, levels=count).tokens_per_s / plain
        for count in range(1, min(known.max_tokens, len(chances)) + 1)
    }
    best = max(speedups, key=speedups.__getitem__)
    return DraftChoice(rows, best if speedups[best] >= 1 + MIN_GAIN else 0, speedups[best])
