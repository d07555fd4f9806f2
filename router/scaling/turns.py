"""Mutual exclusion of cluster changes that would disturb each other, across all routers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

from router.errors import ApiError

Change = Literal["restart", "scaling", "change of adapters"]


class Changes:
    """The changes under way and their routers: a restart or several scalings, and a change of adapters."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Change, str]] = []

    def begin(self, change: Change, router_id: str) -> str:
        """Begin a change. Returns why it cannot begin, or "" if it has begun."""
        for other, at in self._under_way:
            if change == other != "scaling" or {change, other} == {"restart", "scaling"}:
                return f"a {other} is under way already, asked of {at}: ask again after that"
        self._under_way.append((change, router_id))
        return ""

    def end(self, change: Change, router_id: str) -> None:
        if (change, router_id) in self._under_way:
            self._under_way.remove((change, router_id))

    def forget(self, router_id: str) -> None:
        """Forget the changes of a router that has ended."""
        self._under_way = [each for each in self._under_way if each[1] != router_id]

    @property
    def under_way(self) -> list[Change]:
        return [change for change, _ in self._under_way]


class Turns:
    """One router's access to `Changes`. `begin` and `end` reach the process that keeps them for all
    routers.
    """

    def __init__(self, router_id: str) -> None:
        self.changes = Changes()
        """The changes of a router that is alone."""
        self.begin: Callable[[Change], Awaitable[str]] = self._begin
        self.end: Callable[[Change], None] = lambda change: self.changes.end(change, router_id)
        self._router_id = router_id

    async def _begin(self, change: Change) -> str:
        return self.changes.begin(change, self._router_id)

    @asynccontextmanager
    async def hold(self, change: Change) -> AsyncIterator[None]:
        """Hold a change while the context runs. Raises `ApiError` 409 if another change is under way."""
        refusal = await self.begin(change)
        if refusal:
            raise ApiError(409, refusal, code="change_under_way")
        try:
            yield
        finally:
            self.end(change)
