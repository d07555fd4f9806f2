"""Events of the prefix cache: blocks that can be found from now on, or no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.ids import BlockIdentity
from protocol.kv_events import EventKind, Medium


class CacheEvent(NamedTuple):
    """A block can be found in a tier from now on, or no longer; "cleared": no block in any tier.

    A block that was computed or arrived in the pool comes with what its identity was made of.
    """

    kind: EventKind
    medium: Medium = Medium.GPU
    identity: BlockIdentity = b""
    root: BlockIdentity = b""
    parent: BlockIdentity = b""
    token_ids: Sequence[int] = ()


class CacheLog:
    """Collects events until they are taken. Belongs to the engine's thread."""

    def __init__(self, events: list[CacheEvent]) -> None:
        self._events = events

    def add(self, event: CacheEvent) -> None:
        self._events.append(event)

    def stored(self, medium: Medium, identity: BlockIdentity) -> None:
        self._events.append(CacheEvent("stored", medium, identity))

    def removed(self, medium: Medium, identity: BlockIdentity) -> None:
        self._events.append(CacheEvent("removed", medium, identity))

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
