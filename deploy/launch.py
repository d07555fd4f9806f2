"""Runs a worker in this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protocol.errors import TandemError
from worker.launch import Launch, StopHandle

if TYPE_CHECKING:
    from engine.parallel.leader import Leader
    from kvtransfer.transports.object_store import Carrier
    from worker.cores import CorePlace

log = logging.getLogger(__name__)


def run_launch(
    launch: Launch,
    stop: StopHandle,
    carrier: Carrier | None = None,
    place: CorePlace | None = None,
    leader: Leader | None = None,
) -> str:
    """Run the worker. Returns "" if it ended on request, else the reason why it failed."""
    try:
        from worker.process import run_worker

        run_worker(launch, stop, carrier, place, leader)
    except TandemError as error:
        return str(error)
    except Exception as error:
        log.exception("the worker failed")
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return "" if stop.requested else "the router was lost"
