"""Requests to the launcher for other numbers of workers, the exclusion of concurrent changes, their log."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from router.errors import ApiError
from router.scaling.decide import ScalingDecision


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The number of workers wanted for each role; other roles keep theirs.

    `worth`: ids of the workers that the router knows, those whose loss costs least first.
    """

    targets: dict[str, int]
    worth: list[str]


class ScaleAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's answer. With a `refusal`, about `field` of the request, nothing has changed. Otherwise
    the workers in `started` are starting, and the caller must drain those in `leaving`.
    """

    refusal: str = ""
    field: str = ""
    started: list[str] = []
    leaving: list[str] = []


AskToScale = Callable[[ScaleRequest], Awaitable[ScaleAnswer]]


async def refuse_to_scale(request: ScaleRequest) -> ScaleAnswer:
    """Refuse a change because no launcher manages the workers."""
    refusal = "these workers were not started by a launcher"
    return ScaleAnswer(refusal=refusal, field=min(request.targets, default=""))


MAX_SHOWN = 100


@dataclass(frozen=True)
class ScalingEvent:
    """A decision, its time `at` [s since 1970], the numbers of workers then (`had`), and why it failed."""

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
    """The latest decisions. `publish` also sends an event to the logs of the other routers."""

    def __init__(self) -> None:
        self._events: deque[ScalingEvent] = deque(maxlen=MAX_SHOWN)
        self.publish: Callable[[ScalingEvent], None] = self.note

    def latest(self) -> list[ScalingEvent]:
        """Return the events, the newest first."""
        return list(self._events)[::-1]

    def note(self, event: ScalingEvent) -> None:
        """Add an event, or replace the one of the same time, whose outcome is known now."""
        for place, known in enumerate(self._events):
            if known.at == event.at:
                self._events[place] = event
                return
        self._events.append(event)


Change = Literal["restart", "scaling", "change of adapters"]


class ClusterChanges:
    """The changes in progress and their routers: a restart or several scalings, and a change of adapters."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Change, str]] = []

    def begin(self, change: Change, router_id: str) -> str:
        """Begin a change. Return why it cannot begin, or "" if it has begun."""
        for other, at in self._under_way:
            if change == other != "scaling" or {change, other} == {"restart", "scaling"}:
                return f"a {other} is under way already, asked of {at}: ask again after that"
        self._under_way.append((change, router_id))
        return ""

    def end(self, change: Change, router_id: str) -> None:
        if (change, router_id) in self._under_way:
            self._under_way.remove((change, router_id))

    def forget(self, router_id: str) -> None:
        """Remove the changes of a router that has ended."""
        self._under_way = [each for each in self._under_way if each[1] != router_id]

    @property
    def under_way(self) -> list[Change]:
        return [change for change, _ in self._under_way]


class ChangeTurns:
    """The access of one router to `ClusterChanges`, which one process keeps for all routers."""

    def __init__(self, router_id: str) -> None:
        self.changes = ClusterChanges()
        """The changes of a single router. With several routers `begin` and `end` are replaced by functions
        that ask the process with the changes of all.
        """
        self.begin: Callable[[Change], Awaitable[str]] = self._begin
        self.end: Callable[[Change], None] = lambda change: self.changes.end(change, router_id)
        self._router_id = router_id

    async def _begin(self, change: Change) -> str:
        return self.changes.begin(change, self._router_id)

    @asynccontextmanager
    async def hold(self, change: Change) -> AsyncIterator[None]:
        """Hold a change while the context runs. Raises `ApiError` 409 if another change is in progress."""
        refusal = await self.begin(change)
        if refusal:
            raise ApiError(409, refusal, code="change_under_way")
        try:
            yield
        finally:
            self.end(change)
