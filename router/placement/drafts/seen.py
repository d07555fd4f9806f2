"""Observed rates of drafts on a decode worker relative to the predictions, by draft maker and load.

Predictions are composed of parts, each measured alone. They miss what the parts take from each other, such
as shared cores and messages, and are based on measurements at a start-up that may have been busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, isfinite, log2
from typing import NamedTuple

from router.placement.drafts.interface import DraftMaker

MEMORY_S = 8.0
"""[seconds of the worker] The time constant of the average: texts differ, and a host has phases."""
LEAST_S = 0.25
"""[seconds of the worker] The least observation that counts."""
LEAST_RATIO = 0.01
"""The ratio of a worker that stood still: a number to divide by."""
MOST_ROWS = 2.0**20
"""Loads from here on count as one, infinite ones too."""


class _Sums(NamedTuple):
    """Sums over seconds of the worker: of the ratio of observed to predicted, and of 1.

    So a prediction that was far too high, as when a worker measures its first steps, keeps requests away for
    seconds; sums in tokens did so for minutes. A prediction that was far too low brings requests there, and
    fades.
    """

    ratios: float = 0.0
    seconds: float = 0.0


class SeenRates:
    """Observed rates of requests that are alike. It takes and returns plain values and reads no clock."""

    def __init__(self) -> None:
        self._sums: defaultdict[DraftMaker, dict[int, _Sums]] = defaultdict(dict)

    def note(self, place: DraftMaker, rows: float, seconds: float, seen: float, predicted: float) -> None:
        """Note that one of `rows` requests got `seen` tokens in `seconds` instead of `predicted`."""
        if not (isfinite(predicted) and predicted > 0):
            return
        share = seconds / rows
        by_load = self._sums[place]
        before, kept = by_load.get(load_of(rows), _Sums()), exp(-share / MEMORY_S)
        by_load[load_of(rows)] = _Sums(
            kept * before.ratios + share * seen / predicted, kept * before.seconds + share
        )

    def knows(self, place: DraftMaker, rows: float) -> bool:
        """Return whether the place was observed at about this load."""
        return _at(self._sums.get(place, {}), load_of(rows)) is not None

    def correction(self, place: DraftMaker, rows: float) -> float:
        """Return the factor for a prediction, observed at the nearest load."""
        load, by_load = load_of(rows), self._sums.get(place, {})
        known = [each for each in by_load if _at(by_load, each) is not None]
        nearest = min(known, key=lambda each: abs(each - load), default=load)
        return _at(by_load, nearest) or 1.0


def _at(by_load: Mapping[int, _Sums], load: int) -> float | None:
    sums = by_load.get(load)
    if sums is None or sums.seconds < LEAST_S:
        return None
    return max(sums.ratios / sums.seconds, LEAST_RATIO)


def load_of(rows: float) -> int:
    """Return the class of a load: loads within about half a doubling count as one."""
    return round(2 * log2(min(max(1.0, rows), MOST_ROWS)))
