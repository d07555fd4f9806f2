"""The time of a decode step by the width of its drafts, and the time of drafting, both learned online.

A step's time is a curve measured at the start times a correction learned from the steps that run: the ratio
of measured to predicted time, for each pair of batch size and widening by drafts. The ratio includes whatever
the curve leaves out (contexts, sockets, the drafters' bookkeeping).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

T = TypeVar("T")

PACE = 0.1
"""[share] The part of the difference between measured and predicted time that one measurement corrects."""
LONGEST_STRIDE = 0.5
"""[log ratio] The largest difference that counts, since a measurement may include a pause of the machine."""
DRAFT_START = 4.0
"""[levels] The fixed cost of drafting for a batch, as measured with the bundled draft and heads."""
DRAFT_TOKEN = 0.5
"""[levels] The cost of each draft token, measured with the same."""
_WIDTHS = np.arange(7.0)
"""Base-2 logarithms of the rows per sequence, which are at most 64."""
_MOST_ROWS = 1 << 20
"""More rows than any step has."""


@dataclass(frozen=True)
class MeasuredCurve:
    """Seconds of a forward over `rows[i]` rows (ascending), and of a prefilled prompt token."""

    rows: Sequence[int]
    seconds: Sequence[float]
    per_prompt_token: float = 5e-5


UNMEASURED = MeasuredCurve(rows=(1, 1024), seconds=(4e-3, 132e-3))
"""A guess, used where nothing was measured because only a request asks for speculation."""


class TargetTime:
    """Seconds of a step without its drafting, by its number of sequences and of draft rows."""

    def __init__(self, curve: MeasuredCurve) -> None:
        self.per_prompt_token = curve.per_prompt_token
        seconds = np.minimum.accumulate(curve.seconds[::-1])[::-1]  # a disturbance only adds
        slope = (seconds[-1] - seconds[-2]) / (curve.rows[-1] - curve.rows[-2])
        self._rows = np.array([*curve.rows, _MOST_ROWS], float)
        self._seconds = np.append(seconds, seconds[-1] + slope * (_MOST_ROWS - curve.rows[-1]))
        self._logs: dict[int, np.ndarray] = {}
        """Log ratios by width, for each bit length of a batch's size; interpolated between powers of two."""
        self._seen: dict[int, np.ndarray] = {}
        """The number of windows that each ratio was learned from."""

    def seconds(self, num_sequences: int, drafted: ArrayLike) -> np.ndarray:
        """Return the seconds of steps with `drafted` rows."""
        rows = num_sequences + np.asarray(drafted, float)
        logs = np.interp(np.log2(rows / num_sequences), _WIDTHS, self._ratios(num_sequences))
        seconds: np.ndarray = np.interp(rows, self._rows, self._seconds) * np.exp(logs)
        return seconds

    def observe(self, num_sequences: int, drafted: float, measured: float) -> None:
        """Learn from the mean time of a window of steps."""
        size = num_sequences.bit_length()
        if size not in self._logs:
            self._logs[size] = self._ratios(num_sequences).copy()
            self._seen[size] = np.zeros(len(_WIDTHS))
        seen = self._seen[size]
        near = (1 - abs(_WIDTHS - math.log2(1 + drafted / num_sequences))).clip(0)
        error = math.log(max(measured, 1e-9) / self.seconds(num_sequences, [drafted])[0])
        stride = min(max(error, -LONGEST_STRIDE), LONGEST_STRIDE)
        pace = near * np.maximum(PACE, 1 / (1 + seen))
        self._logs[size] += stride * np.where(seen > 0, pace, pace.max())  # unmeasured widths follow
        self._seen[size] = seen + near

    def _ratios(self, num_sequences: int) -> np.ndarray:
        return _nearest(self._logs, num_sequences, np.zeros(len(_WIDTHS)))


class DraftTime:
    """Seconds to draft for a batch with one method: `start` + levels + `token` * draft tokens, times a scale
    that is measured for each power of two of the batch size.
    """

    def __init__(self, first_unit: float, start: float = DRAFT_START, token: float = DRAFT_TOKEN) -> None:
        """Assume `first_unit` seconds per level until one is measured; `start` and `token` are in levels."""
        self.start, self.token = start, token
        self._units: dict[int, float] = {}
        self._first_unit = first_unit
        self.per_read: float | None = None
        """Seconds to read a token that was not drafted from before; None until measured."""

    def unit(self, num_requests: int) -> float:
        """Return the seconds of a level."""
        return _nearest(self._units, num_requests, self._first_unit)

    def units(self, levels: int, tokens: int) -> float:
        """Return the cost, in levels, of drafts with `levels` levels and `tokens` tokens in all."""
        return self.start + levels + self.token * tokens

    def observe(self, num_requests: int, levels: int, tokens: int, measured: float) -> None:
        size, found = num_requests.bit_length(), measured / self.units(levels, tokens)
        known = self._units.get(size, found)
        self._units[size] = known + PACE * (min(found, known * math.exp(LONGEST_STRIDE)) - known)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Learn from `num_tokens` prompt tokens that the drafter read."""
        found = max(seconds, 0.0) / num_tokens
        known = found if self.per_read is None else self.per_read
        self.per_read = known + PACE * (found - known)


def _nearest(known: dict[int, T], num_requests: int, default: T) -> T:
    """Return the value for the nearest batch size, compared by bit length."""
    size = num_requests.bit_length()
    sizes = list(known)  # a copy, since another thread may add sizes
    return known[min(sizes, key=lambda other: abs(other - size))] if sizes else default
