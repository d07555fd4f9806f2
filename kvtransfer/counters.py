"""Counters of one side of the transfer, safe to add to from every thread."""

from __future__ import annotations

import threading
from collections import defaultdict


class TransferCounters:
    """Totals by name since construction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)
