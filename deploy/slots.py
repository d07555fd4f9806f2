"""The workers that are kept running: each one's place, through all its incarnations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from deploy.nodes import Node
from protocol.config import ServeConfig
from protocol.roles import ROLES, RoleSpec

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Failures of a worker that ran this long since are forgotten."""

FRAIL_S = 5.0
"""A process that vanishes this soon after it became ready is taken to have died by itself."""

UNTOLD_S = 10.0
"""Who was let go and is there so long after --drain-timeout was never told: it would have ended itself."""


@dataclass(eq=False)
class Slot:
    """A worker's place, through all its incarnations."""

    worker_id: str
    role: RoleSpec
    incarnation: str = ""
    node: Node | None = None
    placed_as: str | None = None
    """The role that it took a place on its node as, which it keeps when it changes its own."""
    group: Any = None
    """The placement group that holds the worker's place on its node."""
    actor: Any = None
    ended: Any = None
    ping: Any = None
    """The unanswered question to its actor since the worker fell silent."""
    look: Any = None
    """The unanswered question to its actor while the worker starts."""
    looked_at: float = 0.0
    """When that was asked."""
    seen: Any = None
    """The actor's latest answer, a `Look`."""
    num_replaced: int = 0
    """Templates that the actor has told of as replaced."""
    reminded_at: float = 0.0
    """When the log last said what the worker's start waits for."""
    config: ServeConfig = field(default_factory=ServeConfig)
    """What its node makes of the deployment's."""
    process: psutil.Process | None = None
    started: float = 0.0
    ready_since: float | None = None
    was_ready: bool = False
    failures: int = 0
    """How often in a row it died by itself."""
    start_at: float | None = None
    added_at: float | None = None
    """When it was added to those that were deployed: it may fail to start, and the others go on."""
    leaves: bool = False
    """It is drained, and not started anew."""
    changes: bool = False
    """It is drained, to go on in another role or as another process."""
    let_go_at: float = 0.0
    """When a router was last told that it may leave or change."""
    dismissed_at: float | None = None
    """When the router had no more use for it: it ends by itself."""

    @property
    def place(self) -> str:
        """The role whose place on a node it has, or is to get."""
        return self.placed_as or self.role.name

    @property
    def stays_to_decode(self) -> bool:
        return self.role.purpose == "decode" and not self.leaves and not self.changes

    def take_back(self, drain_timeout: float, now: float) -> bool:
        """Whether it stays after all: the router that it was let go for was lost before it told it."""
        stays = (self.leaves or self.changes) and now - self.let_go_at > drain_timeout + UNTOLD_S
        if stays:
            self.leaves = self.changes = False
        return stays

    def note_death(self, vanished: bool, now: float) -> float:
        """Returns the seconds until the next start: 0 unless it dies by itself again and again.

        A ready worker whose process `vanished` was killed by somebody else; one that fails says why.
        """
        lived = now - self.ready_since if self.ready_since is not None else 0.0
        if lived > STABLE_S:
            self.failures = 0
        if not vanished or lived < FRAIL_S:
            self.failures += 1
        self.ready_since = None
        again = self.failures - 1
        return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (again - 1)) if again > 0 else 0.0


def make_slots(config: ServeConfig) -> list[Slot]:
    """A place for each worker that is deployed."""
    return [
        Slot(f"{role.name}-{index}", role)
        for role in ROLES.values()
        for index in range(config.num_replicas(role))
    ]


def let_go(slots: Sequence[Slot], worker_id: str, for_good: bool) -> str:
    """Why a worker can't leave, or change its role; "": it can, which is written down at once."""
    slot = slot_of(slots, worker_id)
    if slot is None:
        return "it has left already"
    if not any(other.stays_to_decode for other in slots if other is not slot):
        return "no other decode worker stays"
    if (slot.leaves or slot.changes) and slot.leaves != for_good:
        return "it leaves or changes its role already"
    slot.leaves, slot.changes, slot.let_go_at = for_good, not for_good, time.monotonic()
    return ""


def slot_of(slots: Sequence[Slot], worker_id: str) -> Slot | None:
    return next((slot for slot in slots if slot.worker_id == worker_id), None)
