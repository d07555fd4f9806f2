"""How real steps correct predicted times, without trusting any one of them.

Machines are noisy, so a correction follows the logarithm of measured over predicted in bounded strides: it
settles near the median, and once a size is known one slow step moves it by two or three per cent at most.
"""

from __future__ import annotations

import math

import numpy as np

_LONGEST_STRIDE, _LONGEST_OF_NEW = 0.25, 1.0
"""What is taken of a step's log-ratio at most; the latter of the first steps of a size, lest it takes many to
mend what was measured badly at start."""
_COMMON_PACE = 0.08
_LOCAL_PACE = 0.03
"""Of a size that is seen all the time."""
_DOUBT = 8
"""One over what a step moves whose size was not seen for long."""
_FRESHNESS = 1 - 1 / 48
"""What is left of a size's weight after each step of any size: what was last seen long ago soon counts for
little against a new step there."""
_NEW = 8
"""Steps of a size that set its own ratio, before most of what they show is put down to the machine."""


class Ratio:
    """Measured over predicted, tracked as its logarithm: first their mean, later faded."""

    def __init__(self) -> None:
        self.log = 0.0
        self._seen = 0

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    def observe(self, predicted: float, measured: float) -> None:
        """`predicted` includes the correction so far."""
        self._seen += 1
        self.log += max(_COMMON_PACE, 1 / self._seen) * _stride(predicted, measured, _LONGEST_STRIDE)


class Correction:
    """Measured over predicted by size: one ratio common to all steps, and a local one at each power of two.

    The common one follows the pace of the machine. The local ones are set by the first steps there: what is
    measured at start finds its code and data in the caches, more so at some sizes than at others. Unseen
    sizes take over that of the nearest one seen.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.common = 0.0
        """A logarithm, as are the local ones."""
        self._local = [0.0] * (max_size.bit_length() + 1)
        self._seen = [0.0] * len(self._local)
        self._weights = [0.0] * len(self._local)
        """As `_seen`, faded."""

    def factor(self, size: int) -> float:
        low, weight = self._place(size)
        return math.exp(self.common + (1 - weight) * self._local[low] + weight * self._local[low + 1])

    def factors(self) -> np.ndarray:
        """Those of the sizes from 0 to `max_size`."""
        powers = np.log2(np.arange(self.max_size + 1).clip(1))
        return np.exp(self.common + np.interp(powers, range(len(self._local)), self._local))

    def observe(self, size: int, predicted: float, measured: float) -> None:
        """`predicted` includes the correction so far."""
        low, weight = self._place(size)
        is_new = self.num_seen(size) < _NEW
        stride = _stride(predicted, measured, _LONGEST_OF_NEW if is_new else _LONGEST_STRIDE)
        paces = [self._pace(power, is_new) for power in (low, low + 1)]
        self._weights = [each * _FRESHNESS for each in self._weights]
        for power, part, pace in ((low, 1 - weight, paces[0]), (low + 1, weight, paces[1])):
            self._local[power] += pace * part * stride
            self._seen[power] += part
            self._weights[power] += part
        if is_new:
            self._fill()
        else:
            self.common += _COMMON_PACE * stride

    def _pace(self, power: int, is_new: bool) -> float:
        if is_new:
            return 1 / (2 + self._seen[power])
        return max(_LOCAL_PACE, 1 / (_DOUBT + self._weights[power]))

    def num_seen(self, size: int) -> float:
        """Steps at the powers of two around the size."""
        low, _ = self._place(size)
        return self._seen[low] + self._seen[low + 1]

    def _fill(self) -> None:
        known = [power for power, seen in enumerate(self._seen) if seen]
        for power, seen in enumerate(self._seen):
            if not seen:
                self._local[power] = self._local[min(known, key=lambda other: abs(other - power))]

    def _place(self, size: int) -> tuple[int, float]:
        """The power of two below `size`, and how far on the way to the next one it is, 0 to 1."""
        power = math.log2(min(max(size, 1), self.max_size))
        low = int(power)
        return low, power - low


def _stride(predicted: float, measured: float, longest: float) -> float:
    ratio = math.log(max(measured, 1e-9) / max(predicted, 1e-9))
    return min(max(ratio, -longest), longest)
