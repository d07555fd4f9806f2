"""Simulated time: planned events, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Events:
    """A queue of events. Events of the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Plan an event at `time`, or now if that has passed."""
        heapq.heappush(self._planned, (max(time, self.now), next(self._order), happen))

    def run(self) -> None:
        """Run until no event is left."""
        while self._planned:
            self.now, _, happen = heapq.heappop(self._planned)
            happen()
