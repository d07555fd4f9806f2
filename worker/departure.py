"""How a worker leaves: its requests go elsewhere, then its loop ends, or begins anew in another role."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from protocol.messages import Leave, Leaving
from protocol.roles import ROLES, RoleSpec
from worker.link import RouterLink
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

LEAVE_GRACE_S = 2.0
"""Beyond --drain-timeout, after which the router is taken to have forgotten the worker."""


class Departure:
    """`stop` ends the loop. Any thread may call `ask`; the rest belongs to the loop's thread.

    `next_role` is the role that the worker goes on in after this loop, and its incarnation then.
    """

    def __init__(self, parts: WorkerParts, link: RouterLink, stop: Callable[[], None]) -> None:
        self._parts = parts
        self._link = link
        self._stop = stop
        self._asked = threading.Event()
        self._end_by: float | None = None
        """When to end if the router has not answered `Leaving` (monotonic seconds)."""
        self.next_role: tuple[RoleSpec, str] | None = None

    @property
    def was_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Have the router take the requests elsewhere, then end; the second time at once."""
        if self._asked.is_set():
            self._stop()
        self._asked.set()
        self._parts.wake.set()

    def advance(self, now: float) -> None:
        """Tell the router what was asked, and end if it never answers. `now` is `time.monotonic()`."""
        if not self._asked.is_set():
            return
        parts = self._parts
        if self._end_by is None:
            log.info("told to end: the router takes the requests elsewhere")
            self._end_by = now + parts.config.drain_timeout + LEAVE_GRACE_S
            self._link.send(Leaving(worker_id=parts.worker_id, incarnation=parts.incarnation))
        elif now > self._end_by:
            log.error("the router did not let this worker go within --drain-timeout; it ends")
            self._stop()

    def let_go(self, message: Leave) -> None:
        """The router has taken everything away."""
        if message.incarnation != self._parts.incarnation:
            self._parts.counters.add("stale_messages_total")
            return
        if message.role in ROLES and message.next_incarnation is not None:
            self.next_role = ROLES[message.role], message.next_incarnation
        self._stop()
