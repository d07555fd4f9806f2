"""The departure of a worker: routers move its requests, then its loop ends, or restarts in another role."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from protocol.roles import ROLES, RoleSpec
from protocol.router_to_worker import PrepareToLeave
from protocol.worker_to_router import Leaving
from worker.link import RouterLink, RouterLinks
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

LEAVE_GRACE_S = 2.0
"""[s] Time after --drain-timeout from which on a silent router counts as having released the worker."""


class Departure:
    """A departure, which calls `stop` once the routers have moved the worker's requests. Any thread may call
    `ask`; the rest belongs to the loop's thread.

    `next_role` is the role, and the incarnation, in which the worker continues after this loop.
    """

    def __init__(self, parts: WorkerParts, links: RouterLinks, stop: Callable[[], None]) -> None:
        self._parts = parts
        self._links = links
        self._stop = stop
        self._asked = threading.Event()
        self._leaving: Leaving | None = None
        """The message to the routers, once the worker was asked to leave."""
        self._end_by: float | None = None
        """Deadline for the routers' answers to `Leaving` (monotonic seconds)."""
        self.next_role: tuple[RoleSpec, str] | None = None

    @property
    def was_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the routers to move the requests, then end. A second call ends the loop at once."""
        if self._asked.is_set():
            self._stop()
        self._asked.set()
        self._parts.wake.set()

    def prepare(self, message: PrepareToLeave) -> None:
        """Tell all routers that the worker leaves, because a router was asked to drain it."""
        role, incarnation = message.role, message.next_incarnation
        self._leaving = Leaving(**self._parts.ids, role=role, next_incarnation=incarnation)
        self._announce(self._leaving)

    def advance(self, now: float) -> None:
        """Tell the routers that the worker leaves. End it after the deadline (`now`: monotonic)."""
        if self._leaving is None:
            if not self._asked.is_set():
                return
            log.info("told to end: the router takes the requests elsewhere")
            self._leaving = Leaving(**self._parts.ids)
        self._announce(self._leaving)
        self._end_if_free(self._leaving)
        if self._end_by is None:
            self._end_by = now + self._parts.config.drain_timeout + LEAVE_GRACE_S
        elif now > self._end_by:
            log.error("a router did not let this worker go within --drain-timeout; it ends")
            self._stop()

    def let_go(self, link: RouterLink) -> None:
        """Note that the router has no more requests on this worker."""
        link.has_let_go = True
        if self._leaving is not None:
            self._end_if_free(self._leaving)

    def _announce(self, leaving: Leaving) -> None:
        """Tell each router once, including routers that start meanwhile."""
        for link in self._links:
            if not link.told_leaving:
                link.told_leaving = True
                link.send(leaving)

    def _end_if_free(self, leaving: Leaving) -> None:
        """End the loop if all routers have let go, except lost ones."""
        has_let_go = [link.has_let_go for link in self._links if link.has_let_go or link.is_connected]
        if not has_let_go or not all(has_let_go):
            return
        if leaving.role in ROLES and leaving.next_incarnation is not None:
            self.next_role = ROLES[leaving.role], leaving.next_incarnation
        self._stop()
