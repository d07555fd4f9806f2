"""Whether to speculate, with how many tokens, and up to which load.

The reckoning of `speculation/control/planner.py` for requests that are all alike: tokens a step commits over
the seconds it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import msgspec
import numpy as np

from planner.profile import DraftProfile

LEAST_GAIN = 1.03
"""Speedup below which the live controller does not draft."""


class DraftChoice(msgspec.Struct, frozen=True):
    """For batches of `rows` requests: the best number of drafted tokens, 0 for none, and its speedup."""

    rows: int
    num_tokens: int
    speedup: float


def draft_choices(draft: DraftProfile, rows: Sequence[int]) -> list[DraftChoice]:
    return [_choice(draft, each) for each in rows]


def last_paying(choices: Sequence[DraftChoice]) -> int:
    """The largest batch for which drafting pays; 0 if it never does."""
    return max((choice.rows for choice in choices if choice.num_tokens), default=0)


def _choice(draft: DraftProfile, rows: int) -> DraftChoice:
    plain = rate(draft, rows, 0)
    speedups = [rate(draft, rows, count) / plain for count in range(draft.max_tokens + 1)]
    count = int(np.argmax(speedups))
    if speedups[count] < LEAST_GAIN:
        count = 0
    return DraftChoice(rows, count, speedups[count])


def rate(draft: DraftProfile, rows: int, num_tokens: int) -> float:
    """Tokens a second of `rows` requests that draft so many tokens each."""
    method = draft.method
    survival = accumulate(method.acceptance[:num_tokens], mul)
    seconds = step_seconds(draft, rows * (1 + num_tokens))
    if num_tokens:
        seconds += method.start_s + num_tokens * (method.level_s + rows * method.token_s)
    return rows * (1 + sum(survival)) / seconds


def step_seconds(draft: DraftProfile, rows: int) -> float:
    """Beyond the last measured number of rows it goes on as between the last two."""
    known, seconds = draft.step_time.rows, draft.step_time.seconds
    if rows <= known[-1] or len(known) == 1:
        return float(np.interp(rows, known, seconds))
    slope = (seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
    return seconds[-1] + (rows - known[-1]) * slope
