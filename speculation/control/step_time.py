"""What a step takes: the target's packed forward with its sampling, the drafting, and what surrounds them.

The shapes of these functions are measured at start (`calibration`); real steps then correct them. Machines
are noisy, so a correction follows the logarithm of measured over predicted in small, bounded strides: it
settles near the median, and one slow step moves it by two per cent at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

_LONGEST_STRIDE = 0.25
"""What is taken of a step's log-ratio at most."""
_COMMON_PACE = 0.08
_LOCAL_PACE = 0.03
_EAGER = 10
"""Steps for which a size's own ratio moves faster, by as much at first."""
_REBUILD_EVERY = 16


class Ratio:
    """Measured over predicted, tracked as its logarithm: first their mean, later at `pace`."""

    def __init__(self, pace: float) -> None:
        self.log = 0.0
        self.seen = 0
        self._pace = pace

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    def observe(self, predicted: float, measured: float) -> float:
        """`predicted` includes the correction so far. Returns what is taken of the step's log-ratio."""
        ratio = math.log(max(measured, 1e-9) / max(predicted, 1e-9))
        stride = min(max(ratio, -_LONGEST_STRIDE), _LONGEST_STRIDE)
        self.seen += 1
        self.log += max(self._pace, 1 / self.seen) * stride
        return stride


class RatioBySize:
    """One ratio common to all sizes, and a local one at each power of two.

    The common one is the faster: a busier machine slows down every size alike.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.common = Ratio(_COMMON_PACE)
        self._local = [0.0] * (max_size.bit_length() + 1)
        self._seen = [0.0] * len(self._local)

    def factor(self, size: int) -> float:
        low, weight = self._place(size)
        return math.exp(self.common.log + (1 - weight) * self._local[low] + weight * self._local[low + 1])

    def factors(self) -> np.ndarray:
        """Those of the sizes from 0 to `max_size`."""
        powers = np.log2(np.arange(self.max_size + 1).clip(1))
        return np.exp(self.common.log + np.interp(powers, range(len(self._local)), self._local))

    def observe(self, size: int, predicted: float, measured: float) -> None:
        stride = self.common.observe(predicted, measured)
        low, weight = self._place(size)
        for power, part in ((low, 1 - weight), (low + 1, weight)):
            self._seen[power] += part
            pace = _LOCAL_PACE * max(1.0, _EAGER / (1 + self._seen[power]))
            self._local[power] += pace * part * stride

    def num_seen(self, size: int) -> float:
        """At the power of two below `size`, or above it if it was seen more often there."""
        low, _ = self._place(size)
        return max(self._seen[low], self._seen[low + 1])

    def _place(self, size: int) -> tuple[int, float]:
        """The power of two below `size`, and how far on the way to the next one it is, 0 to 1."""
        power = math.log2(min(max(size, 1), self.max_size))
        low = int(power)
        return low, power - low


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
        self._correction = RatioBySize(max_rows)
        self._observed = 0
        self._rebuild()

    @property
    def max_rows(self) -> int:
        return self._correction.max_size

    def seconds(self, num_sequences: int, rows: int, context: float) -> float:
        return self._base[min(rows, self.max_rows)] + self._linear(num_sequences, rows, context)

    def num_seen(self, rows: int) -> float:
        """Observed steps of about so many rows."""
        return self._correction.num_seen(min(rows, self.max_rows))

    def curve(self, num_sequences: int, rows: int, num_more: int, context: float) -> list[float]:
        """Seconds for `rows` and up to `num_more` rows more; fewer where `max_rows` is reached."""
        start = self._linear(num_sequences, rows, context)
        slope = self._scale * self.times.per_attended * context
        base = self._base[rows : rows + num_more + 1]
        return [seconds + start + slope * more for more, seconds in enumerate(base)]

    def observe(self, num_sequences: int, rows: int, context: float, measured: float) -> None:
        size = min(rows, self.max_rows)
        predicted = float(self._shape[size]) * self._correction.factor(size)
        predicted += self._linear(num_sequences, rows, context)
        self._correction.observe(size, predicted, measured)
        self._observed += 1
        if self._observed % _REBUILD_EVERY == 0:
            self._rebuild()

    def knots(self) -> tuple[list[int], list[float]]:
        """Powers of two, and the seconds of so many rows, corrected. May be called from any thread."""
        base = self._base
        rows = [1 << power for power in range(self.max_rows.bit_length())]
        return rows, [base[size] for size in rows]

    def _linear(self, num_sequences: int, rows: int, context: float) -> float:
        times = self.times
        per_context = times.per_context * num_sequences + times.per_attended * rows
        return self._scale * (times.per_sequence * num_sequences + per_context * context)

    def _rebuild(self) -> None:
        corrected = _rising(self._shape * self._correction.factors())
        self._base: list[float] = corrected.tolist()
        self._scale = self._correction.common.factor


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
    """Seconds of drafting for a batch: once, for each level of the deepest chain, and for each token."""

    start: float = 0.0
    per_level: float = 0.0
    per_token: float = 0.0


class DraftTime:
    """D(levels, tokens) of one method; `times` are corrected, and may be read from any thread.

    What was never measured takes the first measurement as it is.
    """

    def __init__(self, measured: DraftTimes | None = None) -> None:
        self._measured = measured
        self._ratio = Ratio(_COMMON_PACE)
        self.times = measured or DraftTimes()

    def observe(self, levels: int, tokens: int, measured: float) -> None:
        if self._measured is None:
            self._measured = DraftTimes(start=measured / 2, per_token=measured / 2 / tokens)
        times = self.times
        predicted = times.start + times.per_level * levels + times.per_token * tokens
        self._ratio.observe(predicted, measured)
        shape, factor = self._measured, self._ratio.factor
        self.times = DraftTimes(shape.start * factor, shape.per_level * factor, shape.per_token * factor)


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
        self._latest: deque[float] = deque(maxlen=25)

    def observe(self, value: float) -> None:
        self.num_seen += 1
        self._latest.append(value)
        self.value = sorted(self._latest)[len(self._latest) // 2]
