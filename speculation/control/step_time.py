"""How long steps take: a curve measured at start, corrected by the steps that run.

Times are corrected by batch size and by how much wider drafts make the step: each pair has a ratio of
measured to predicted time. Whatever the curve leaves out (contexts, sockets, the drafters' bookkeeping) is
part of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from speculation.control.settings import Settings

_WIDTHS = np.arange(7.0)
"""Powers of two of the rows of a sequence, which are at most 64."""


@dataclass(frozen=True)
class MeasuredCurve:
    """Seconds of a forward over `rows[i]` rows (ascending), and of a prompt's token when it is prefilled."""

    rows: Sequence[int]
    seconds: Sequence[float]
    per_prompt_token: float = 5e-5


UNMEASURED = MeasuredCurve(rows=(1, 1024), seconds=(4e-3, 132e-3))
"""A guess, where only a request asks for speculation."""


class TargetTime:
    """Seconds of a step beside its drafting, by its number of sequences and its rows."""

    def __init__(self, curve: MeasuredCurve, max_rows: int, settings: Settings) -> None:
        self.per_prompt_token = curve.per_prompt_token
        self._settings = settings
        self._curve = _interpolate(curve, max_rows)
        self._slope = self._curve[-1] - self._curve[-2]
        self._logs: dict[int, np.ndarray] = {}
        """Ratios as logarithms by width, for each number of bits of a batch's size. Between the powers of two
        they are interpolated."""
        self._seen: dict[int, np.ndarray] = {}
        """Windows that each was learned from."""

    def seconds(self, num_sequences: int, rows: float) -> float:
        ratio = math.exp(np.interp(_width(num_sequences, rows), _WIDTHS, self._nearest(num_sequences)))
        below = min(int(rows), len(self._curve) - 2)
        rise = self._curve[below + 1] - self._curve[below]
        return float(self._curve[below] + (rows - below) * rise) * ratio

    def with_drafts(self, num_sequences: int, most: int) -> list[float]:
        """Seconds with 0, 1, ... up to `most` drafted rows, fewer where the curve ends. Never falling."""
        base = self._curve[num_sequences : num_sequences + most + 1]
        widths = np.log2(1 + np.arange(len(base)) / num_sequences)
        logs = np.interp(widths, _WIDTHS, self._nearest(num_sequences))
        return np.maximum.accumulate(base * np.exp(logs)).tolist()  # type: ignore[no-any-return]

    def observe(self, num_sequences: int, rows: float, measured: float, weight: float = 1.0) -> None:
        """The mean of a window of steps; `weight` is 1 for one of full length."""
        settings, size = self._settings, num_sequences.bit_length()
        if size not in self._logs:
            self._logs[size] = self._nearest(num_sequences).copy()
            self._seen[size] = np.zeros(len(_WIDTHS))
        seen = self._seen[size]
        near = (1 - abs(_WIDTHS - _width(num_sequences, rows))).clip(0)
        known = float(near @ seen)
        error = math.log(max(measured, 1e-9) / self.seconds(num_sequences, rows))
        stride = weight * min(max(error, -settings.longest_stride), settings.longest_stride)
        own = near * np.maximum(settings.pace, 1 / (1.5 + seen))
        others = np.where(seen > 0, settings.common_pace, 1 / (1 + known))
        self._logs[size] += stride * np.maximum(own, others)
        self._seen[size] = seen + weight * near

    def table(self, sequences: Sequence[int], drafted: Sequence[int]) -> list[list[float]]:
        """Seconds of steps of so many sequences that verify so many tokens each. For any thread."""
        widths = np.log2(1 + np.array(drafted))
        rows = np.outer(sequences, 1 + np.array(drafted))
        curve = np.interp(rows, np.arange(len(self._curve)), self._curve)
        curve += self._slope * (rows - len(self._curve) + 1).clip(0)
        logs = [np.interp(widths, _WIDTHS, self._nearest(count)) for count in sequences]
        return np.maximum.accumulate(curve * np.exp(logs), axis=1).tolist()  # type: ignore[no-any-return]

    def _nearest(self, num_sequences: int) -> np.ndarray:
        """The ratios of the nearest batch size that was seen."""
        sizes = list(self._logs)
        if not sizes:
            return np.zeros(len(_WIDTHS))
        size = num_sequences.bit_length()
        return self._logs[min(sizes, key=lambda other: abs(other - size))]


class DraftTime:
    """Seconds to draft `levels` deep, `tokens` in all, for a batch of one method.

    The shape is fixed: a start, then as much for a level as for some tokens. Its scale is measured for each
    power of two of the batch's size.
    """

    def __init__(self, settings: Settings, first_unit: float) -> None:
        self._settings = settings
        self._units: dict[int, float] = {}
        self._first_unit = first_unit
        self.per_read: float | None = None
        """Seconds to read a token that was not drafted from before, once measured."""

    def unit(self, num_requests: int) -> float:
        """Seconds of a level, by the nearest batch size that was seen."""
        if not self._units:
            return self._first_unit
        size = num_requests.bit_length()
        return self._units[min(self._units, key=lambda other: abs(other - size))]

    def observe(self, num_requests: int, levels: int, tokens: int, measured: float) -> None:
        size = num_requests.bit_length()
        found = measured / (self._settings.draft_start + levels + self._settings.draft_token * tokens)
        known = self._units.get(size)
        if known is not None:
            longest = math.exp(self._settings.longest_stride)
            found = min(max(found, known / longest), known * longest)
            found = known + self._settings.pace * (found - known)
        self._units[size] = found

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of prompts were read for drafting."""
        found = max(seconds, 0.0) / num_tokens
        known = self.per_read
        self.per_read = found if known is None else known + self._settings.pace * (found - known)


def _interpolate(curve: MeasuredCurve, max_rows: int) -> np.ndarray:
    """Seconds by number of rows, 0 to `max_rows`: never falling, and straight beyond the measured."""
    rows = np.array(curve.rows, float)
    seconds = np.minimum.accumulate(np.array(curve.seconds, float)[::-1])[::-1]  # what disturbs only adds
    sizes = np.arange(max_rows + 1)
    slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
    return np.interp(sizes, rows, seconds) + slope * (sizes - rows[-1]).clip(0)


def _width(num_sequences: int, rows: float) -> float:
    """The logarithm of a sequence's rows, 0 without drafts."""
    return math.log2(max(rows / num_sequences, 1.0))
