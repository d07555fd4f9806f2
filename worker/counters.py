"""Totals since the worker's start, in Prometheus' naming. The heartbeat carries them to the router."""

from __future__ import annotations

import threading
from typing import Literal, get_args

Counter = Literal[
    "handoffs_total",
    "handoff_seconds_total",
    "handoff_failures_total",
    "handoffs_expired_total",
    "handoffs_redirected_total",
    "handoffs_kept_total",
    "reservations_total",
    "reservation_wait_seconds_total",
    "reservations_refused_total",
    "reservations_expired_total",
    "reservations_released_total",
    "kv_transfer_failures_total",
    "kv_blocks_pushed_total",
    "kv_blocks_skipped_total",
    "prefix_fetches_total",
    "prefix_fetch_failures_total",
    "prefix_fetch_seconds_total",
    "prefix_blocks_fetched_total",
    "prefix_blocks_lent_total",
    "stale_messages_total",
    "dropped_messages_total",
    "duplicate_messages_total",
    "step_failures_total",
    "loop_seconds_total",
    "engine_seconds_total",
    "computed_tokens_total",
]


class Counters:
    """Written by the loop's thread (and its helpers), read by the heartbeat's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(get_args(Counter), 0.0)

    def add(self, name: Counter, amount: float = 1.0) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)

    def __getitem__(self, name: Counter) -> float:
        return self._values[name]
