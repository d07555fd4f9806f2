"""The times at which a sequence's stages began and ended, as seen by the router."""

from __future__ import annotations

import time


class RequestTimes:
    """Points in time in monotonic seconds, 0 if not reached yet, and durations in seconds.

    A placement begins at `placed_at`, brings its first token at `answered_at`, and is with its decode worker
    from `taken_over_at` on if a prefill worker began it. Placements before the current one took `earlier_s`.
    `num_steps` steps brought tokens after the first.
    """

    __slots__ = (
        "answered_at",
        "earlier_s",
        "ended_at",
        "num_migrated",
        "num_placed_again",
        "num_steps",
        "parked_at",
        "placed_at",
        "placement_s",
        "queue_s",
        "taken_over_at",
    )

    def __init__(self) -> None:
        self.parked_at = self.placed_at = self.answered_at = self.taken_over_at = self.ended_at = 0.0
        self.queue_s = self.placement_s = self.earlier_s = 0.0
        self.num_steps = self.num_placed_again = self.num_migrated = 0

    def start_placement(self) -> None:
        """Start a new placement; the time of the current one counts as `earlier_s`."""
        if self.placed_at:
            self.earlier_s += time.monotonic() - self.placed_at
        self.placed_at = self.answered_at = self.taken_over_at = 0.0

    def park(self) -> None:
        self.parked_at = time.monotonic()

    def unpark(self) -> None:
        self.queue_s += time.monotonic() - self.parked_at
