"""Events of the prefix cache: blocks that were stored or removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.ids import BlockIdentity
from protocol.kv_events import EventKind, Medium


class CacheEvent(NamedTuple):
    """A block that was stored in a tier or removed from it; "cleared": all blocks of all tiers are gone.

    For a block that was computed or received, the event has the inputs of its identity: root, parent, tokens.
    """

    kind: EventKind
    medium: Medium = Medium.GPU
    identity: BlockIdentity = b""
    root: BlockIdentity = b""
    parent: BlockIdentity = b""
    token_ids: Sequence[int] = ()


class CacheLog:
    """Events since the last `take`. Belongs to the engine's thread."""

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
