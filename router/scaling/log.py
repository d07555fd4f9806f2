"""The latest changes of the number of workers, which every router shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from router.scaling.decide import ScalingDecision

MAX_SHOWN = 100


@dataclass(frozen=True)
class ScalingEvent:
    """A decision, its time [s since 1970], its roles' numbers of workers then, and why it failed."""

    at: float
    decision: ScalingDecision
    had: dict[str, int]
    failure: str | None = None

    def as_json(self) -> dict[str, Any]:
        decision = self.decision
        change = decision.changes_role
        return {
            "at": self.at,
            "targets": dict(decision.targets),
            "had": self.had,
            "reasons": dict(decision.reasons),
            "changes_role": None if change is None else {"from": change[0], "to": change[1]},
            "failure": self.failure,
        }


class ScalingLog:
    """Keeps the latest events. `tell` also sends an event to the logs of the other routers."""

    def __init__(self) -> None:
        self._events: deque[ScalingEvent] = deque(maxlen=MAX_SHOWN)
        self.tell: Callable[[ScalingEvent], None] = self.note

    def latest(self) -> list[ScalingEvent]:
        """Return the events, the newest first."""
        return list(self._events)[::-1]

    def note(self, event: ScalingEvent) -> None:
        """Add an event, or replace it if it has failed since it was added."""
        for place, known in enumerate(self._events):
            if known.at == event.at:
                self._events[place] = event
                return
        self._events.append(event)
