"""What a step takes: the target's packed forward with its sampling, the drafting, and what surrounds them.

The shapes of these functions are measured at start (`calibration`); real steps then correct them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from speculation.control.correction import Correction, Ratio

_REBUILD_EVERY = 16


@dataclass(frozen=True)
class TargetTimes:
    """Seconds of a forward over `rows[i]` rows (ascending), and what each sequence, each token of a
    sequence's context, and each token that a row attends to add to that.
    """

    rows: Many[int]
    seconds: Many[float]
    per_sequence: float = 0.0
    per_context: float = 0.0
    per_attended: float = 0.0


UNMEASURED = TargetTimes(rows=(1, 1024), seconds=(4e-3, 132e-3))
"""A guess of the shape, where a request may ask for speculation that the deployment doesn't have."""


class TargetTime:
    """T(sequences, rows, context): the target's packed forward and the choice of its tokens, in seconds.

    `context` is the mean of the sequences' lengths, in tokens.
    """

    def __init__(self, times: TargetTimes, max_rows: int) -> None:
        self.times = times
        self._shape = _curve(times, max_rows)
        self._correction = Correction(max_rows)
        self._num_observed = self._next_rebuild = 0
        self._corrected: list[float] = []

    @property
    def max_rows(self) -> int:
        return self._correction.max_size

    def seconds(self, num_sequences: int, rows: int, context: float) -> float:
        return self._base()[min(rows, self.max_rows)] + self._linear(num_sequences, rows, context)

    def num_seen(self, rows: int) -> float:
        """Observed steps of about so many rows."""
        return self._correction.num_seen(min(rows, self.max_rows))

    def curve(self, num_sequences: int, num_more: int, context: float) -> list[float]:
        """Seconds for a row of each sequence and up to `num_more` rows more; fewer where `max_rows` is
        reached.
        """
        start = self._linear(num_sequences, num_sequences, context)
        slope = self._scale * self.times.per_attended * context
        base = self._base()[num_sequences : num_sequences + num_more + 1]
        return [seconds + start + slope * more for more, seconds in enumerate(base)]

    def observe(self, num_sequences: int, rows: int, context: float, measured: float) -> None:
        size = min(rows, self.max_rows)
        predicted = float(self._shape[size]) * self._correction.factor(size)
        predicted += self._linear(num_sequences, rows, context)
        self._correction.observe(size, predicted, measured)
        self._num_observed += 1

    def knots(self) -> tuple[list[int], list[float]]:
        """Powers of two, and the seconds of so many rows, corrected. May be called from any thread."""
        base = self._base()
        rows = [1 << power for power in range(self.max_rows.bit_length())]
        return rows, [base[size] for size in rows]

    def _linear(self, num_sequences: int, rows: int, context: float) -> float:
        times = self.times
        per_context = times.per_context * num_sequences + times.per_attended * rows
        return self._scale * (times.per_sequence * num_sequences + per_context * context)

    @property
    def _scale(self) -> float:
        return math.exp(self._correction.common)

    def _base(self) -> list[float]:
        """Seconds by number of rows, worked out anew after some steps."""
        if self._num_observed >= self._next_rebuild:
            self._corrected = _rising(self._shape * self._correction.factors()).tolist()
            self._next_rebuild = self._num_observed + min(max(self._num_observed, 1), _REBUILD_EVERY)
        return self._corrected


def _curve(times: TargetTimes, max_rows: int) -> np.ndarray:
    """Seconds by number of rows, 0 to `max_rows`: never falling, straight between and beyond the measured."""
    rows, seconds = np.array(times.rows, float), _rising(np.array(times.seconds))
    sizes = np.arange(max_rows + 1)
    curve = np.interp(sizes, rows, seconds)
    if len(rows) > 1:
        slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
        curve += slope * (sizes - rows[-1]).clip(0)
    return curve


def _rising(values: np.ndarray) -> np.ndarray:
    """Halfway between the least rising curve above them and the greatest one below."""
    return (np.maximum.accumulate(values) + np.minimum.accumulate(values[::-1])[::-1]) / 2


@dataclass(frozen=True)
class DraftTimes:
    """Seconds of drafting for a batch: once, for each level of the deepest chain, and for each token; and for
    each token of a text that must be read before.
    """

    start: float = 0.0
    per_level: float = 0.0
    per_token: float = 0.0
    per_read: float = 0.0


class DraftTime:
    """D(levels, tokens) of one method; `times` are corrected, and may be read from any thread.

    What was never measured takes the first measurement as it is. What it takes to read is not corrected: most
    drafts read next to nothing.
    """

    def __init__(self, measured: DraftTimes | None = None) -> None:
        self._measured = measured
        self._ratio = Ratio()
        self.times = measured or DraftTimes()

    def observe(self, levels: int, tokens: int, num_read: int, measured: float) -> None:
        if self._measured is None:
            half, each = measured / 2, measured / 2 / (tokens + num_read)
            self._measured = self.times = DraftTimes(start=half, per_token=each, per_read=each)
        times = self.times
        predicted = times.start + times.per_level * levels + times.per_token * tokens
        self._ratio.observe(predicted + times.per_read * num_read, measured)
        shape, factor = self._measured, self._ratio.factor
        per_level, per_token = shape.per_level * factor, shape.per_token * factor
        self.times = DraftTimes(shape.start * factor, per_level, per_token, shape.per_read)


class SurroundingTime:
    """What a whole step takes beyond drafting and the target, by the number of sequences and whether it
    drafts.

    It is not measured at start, since it holds the worker's loop with its sockets.
    """

    def __init__(self, max_sequences: int) -> None:
        sizes = range(max_sequences.bit_length() + 1)
        self._medians = {drafts: [RunningMedian() for _ in sizes] for drafts in (False, True)}
        self.latest = 0.0
        """For steps like the last one. May be read from any thread."""

    def seconds(self, num_sequences: int, drafts: bool) -> float:
        """Of unseen sizes, that of the nearest one; of an unseen kind, that of the other. 0 before the first
        step.
        """
        size = self._size(num_sequences)
        for kind in (drafts, not drafts):
            medians = self._medians[kind]
            seen = [other for other, median in enumerate(medians) if median.num_seen]
            if seen:
                return medians[min(seen, key=lambda other: abs(other - size))].value
        return 0.0

    def num_seen(self, num_sequences: int, drafts: bool) -> int:
        """Steps of such a size and kind."""
        return self._medians[drafts][self._size(num_sequences)].num_seen

    def observe(self, num_sequences: int, drafts: bool, measured: float) -> None:
        median = self._medians[drafts][self._size(num_sequences)]
        median.observe(measured)
        self.latest = median.value

    def _size(self, num_sequences: int) -> int:
        return min(num_sequences.bit_length(), len(self._medians[False]) - 1)


class RunningMedian:
    """Of the latest values; 0 before the first one."""

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0
        self._latest: deque[float] = deque(maxlen=9)

    def observe(self, value: float) -> None:
        self.num_seen += 1
        self._latest.append(value)
        self.value = sorted(self._latest)[len(self._latest) // 2]
