"""What drafts have brought on a decode worker, against what was predicted: by who makes them, and by load.

Predictions are made of parts, each measured for itself. They miss what the parts take of each other, like
cores that workers share and messages, and stem from a start that may have been busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, isfinite, log2
from typing import NamedTuple

from router.placement.drafts.interface import DraftMaker

MEMORY_S = 8.0
"""[seconds of the worker] Over which is averaged: texts differ, and a host has phases."""
LEAST_S = 0.25
"""[seconds of the worker] From which what was seen counts."""


class _Sums(NamedTuple):
    """Of tokens, and of the seconds of the worker that brought them, which are never forgotten."""

    seen: float = 0.0
    predicted: float = 0.0
    seconds: float = 0.0


class SeenRates:
    """Of requests that are alike. Immutable values in, numbers out: no clock."""

    def __init__(self) -> None:
        self._sums: defaultdict[DraftMaker, dict[int, _Sums]] = defaultdict(dict)
        self._latest = DraftMaker()

    def note(self, place: DraftMaker, rows: float, seconds: float, seen: float, predicted: float) -> None:
        """One of `rows` requests that decoded for so long brought `seen` tokens instead of `predicted`."""
        if not (isfinite(predicted) and predicted > 0):
            return
        share = seconds / rows
        by_load = self._sums[place]
        before, kept = by_load.get(load_of(rows), _Sums()), exp(-share / MEMORY_S)
        by_load[load_of(rows)] = _Sums(
            kept * before.seen + seen, kept * before.predicted + predicted, before.seconds + share
        )
        self._latest = place

    def knows(self, place: DraftMaker, rows: float) -> bool:
        """Whether it was seen at about this load."""
        sums = self._sums[place].get(load_of(rows)) if place in self._sums else None
        return sums is not None and sums.seconds >= LEAST_S

    def correction(self, place: DraftMaker, rows: float) -> float:
        """What to multiply a prediction by. As of the nearest load; of a place that was not tried, as of the
        one that was seen last.
        """
        for known in (self._sums.get(place), self._sums.get(self._latest)):
            if known and (found := _nearest(known, load_of(rows))) is not None:
                return found
        return 1.0


def _nearest(by_load: Mapping[int, _Sums], load: int) -> float | None:
    told = [each for each, sums in by_load.items() if sums.seconds >= LEAST_S]
    if not told:
        return None
    sums = by_load[min(told, key=lambda each: abs(each - load))]
    return max(sums.seen, 1.0) / sums.predicted


def load_of(rows: float) -> int:
    """Loads of about half a doubling are one."""
    return round(2 * log2(max(rows, 1.0)))
