"""The dispatch of requests to workers, the passing on of their tokens, and moves when workers fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from protocol.config import ServeConfig
from router.observe.metrics import Metrics
from router.requests.journal import Journal
from router.workers.registry import Registry, Worker

Send = Callable[[Worker, msgspec.Struct], bool]
"""Queues a message and returns whether the worker can be reached."""


class Core(NamedTuple):
    """The parts of a router that the others share."""

    config: ServeConfig
    journal: Journal
    registry: Registry
    metrics: Metrics
    send: Send
