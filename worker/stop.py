"""Ending a worker from another thread, at any stage of its life."""

from __future__ import annotations

import threading
from typing import Protocol


class Stoppable(Protocol):
    def stop(self) -> None: ...


class StopHandle:
    """Remembers a stop that comes before there is anything to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._target: Stoppable | None = None

    @property
    def requested(self) -> bool:
        return self._requested

    def stop(self) -> None:
        with self._lock:
            self._requested = True
            if self._target is not None:
                self._target.stop()

    def attach(self, target: Stoppable) -> None:
        with self._lock:
            self._target = target
            if self._requested:
                target.stop()
