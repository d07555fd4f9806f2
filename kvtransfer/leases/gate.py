"""A gate that writers pass before they touch leased blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WriteGate:
    """Lets writers in until it is closed, then calls `on_empty` when the last one has left.

    A gate `within` another one is closed, too, when that one is.
    """

    def __init__(self, on_empty: Callable[[], None] | None = None, within: WriteGate | None = None) -> None:
        self._state = threading.Condition()
        self._writers = 0
        self._open = True
        self._on_empty = on_empty
        self._within = within

    @property
    def is_open(self) -> bool:
        return self._open and (self._within is None or self._within.is_open)

    def enter(self) -> bool:
        """Return whether the caller may write now; if so it must `leave` afterwards."""
        if self._within is not None and not self._within.enter():
            return False
        with self._state:
            if self._open:
                self._writers += 1
                return True
        if self._within is not None:
            self._within.leave()
        return False

    def leave(self) -> None:
        with self._state:
            self._writers -= 1
            emptied = not self._writers and not self._open
            self._state.notify_all()
        if emptied and self._on_empty is not None:
            self._on_empty()
        if self._within is not None:
            self._within.leave()

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Enclose one bounded write; yield whether it is allowed."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave()

    def close(self) -> bool:
        """Begin no write after this. Return whether none is running; if one is, `on_empty` follows."""
        with self._state:
            self._open = False
            return not self._writers

    def wait_empty(self, deadline: float) -> bool:
        """Return whether the last writer has left by the deadline (monotonic seconds)."""
        with self._state:
            return self._state.wait_for(lambda: not self._writers, max(0.0, deadline - time.monotonic()))
