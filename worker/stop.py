"""Ends a worker from another thread, at any stage of its life."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopHandle:
    """Remembers a stop that comes before the loop exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_loop: Callable[[], None] | None = None
        self.requested = False

    def stop(self) -> None:
        with self._lock:
            self.requested = True
            if self._stop_loop is not None:
                self._stop_loop()

    def attach(self, stop_loop: Callable[[], None]) -> None:
        with self._lock:
            self._stop_loop = stop_loop
            if self.requested:
                stop_loop()
