"""What a worker's process is told, and how it begins."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig, transport_names
from protocol.errors import TandemError
from protocol.roles import RoleSpec
from worker.stop import StopHandle

if TYPE_CHECKING:
    from kvtransfer.transports.object_store import Carrier

log = logging.getLogger(__name__)


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Travels to the worker as msgpack, like every message of ours."""

    role: RoleSpec
    worker_id: str
    incarnation: str
    router_endpoint: str
    config: ServeConfig
    keys: ClusterKeys


def forks_workers(config: ServeConfig) -> bool:
    """Whether a worker is forked from its host's template. The `object_store` transport needs Ray within the
    worker's own process, which then is the actor's.
    """
    return sys.platform == "linux" and "object_store" not in transport_names(config)


def run_launch(launch: Launch, stop: StopHandle, carrier: Carrier | None = None) -> str:
    """Be the worker. Returns "" when it ended as asked, else why it could not go on."""
    try:
        from worker.process import run_worker

        run_worker(
            launch.role,
            launch.config,
            launch.worker_id,
            launch.router_endpoint,
            launch.keys,
            stop,
            launch.incarnation,
            carrier=carrier,
        )
    except TandemError as error:
        return str(error)
    except Exception as error:
        log.exception("the worker failed")
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return "" if stop.requested else "the router was lost"
