"""Splits the time of the engine's steps: drafting, the target's part, and what surrounds them."""

from __future__ import annotations

import time


class StepClock:
    """Told where a step stands; seconds."""

    def __init__(self) -> None:
        self._began = self._mark = 0.0
        self._inner = 0.0
        self._followed = False

    def begin(self) -> float | None:
        """A step begins. Returns what the one before took beyond drafting and the target, None if the engine
        was idle between them.
        """
        now = time.perf_counter()
        surroundings = now - self._began - self._inner if self._followed else None
        self._began, self._inner, self._followed = now, 0.0, False
        return surroundings

    def mark(self) -> None:
        """Drafting, or the target's part, begins."""
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """It has ended; returns what it took."""
        now = time.perf_counter()
        seconds = now - self._mark
        self._mark = now
        self._inner += seconds
        return seconds

    def end(self, followed: bool) -> None:
        """The step is over; `followed`: there are sequences for another one at once."""
        self._followed = followed
