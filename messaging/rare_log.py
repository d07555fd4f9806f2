"""Limits log lines that strangers can cause."""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_S = 10.0


class RareLog:
    """Logs at most one warning per `INTERVAL_S`, with the number of suppressed ones. Thread-safe.

    Counters still count every event.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._due = 0.0
        self._kept_back = 0

    def warning(self, text: str, *arguments: object) -> None:
        with self._lock:
            if time.monotonic() < self._due:
                self._kept_back += 1
                return
            self._due = time.monotonic() + INTERVAL_S
            others, self._kept_back = self._kept_back, 0
        more = f" (and {others} more like it before)" if others else ""
        self._logger.warning(text + more, *arguments)
