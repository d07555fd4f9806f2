"""When the stages of a sequence began and ended, as the router saw it."""

from __future__ import annotations

import time


class RequestTimes:
    """Monotonic seconds, 0 for what has not happened, and seconds that were spent.

    A placement begins at `placed_at`, brings its first token at `answered_at`, and is with its decode worker
    from `taken_over_at` on, if a prefill worker began. `earlier_s` went to placements before the current one.
    `num_steps` brought tokens after the first.
    """

    __slots__ = (
        "answered_at",
        "earlier_s",
        "ended_at",
        "num_migrated",
        "num_placed_anew",
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
        self.num_steps = self.num_placed_anew = self.num_migrated = 0

    def start_placement(self) -> None:
        """Whoever has it loses it."""
        if self.placed_at:
            self.earlier_s += time.monotonic() - self.placed_at
        self.placed_at = self.answered_at = self.taken_over_at = 0.0

    def park(self) -> None:
        self.parked_at = time.monotonic()

    def unpark(self) -> None:
        self.queue_s += time.monotonic() - self.parked_at
