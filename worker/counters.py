"""A worker's totals since its start, as `protocol.metrics` declares them. The heartbeat sends them."""

from __future__ import annotations

import threading

from protocol.metrics import WORKER_COUNTERS


class Counters:
    """Counters that the loop's thread and its helpers write and the heartbeat's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys((metric.name for metric in WORKER_COUNTERS), 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)

    def __getitem__(self, name: str) -> float:
        return self._values[name]
