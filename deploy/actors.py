"""The Ray actor that is a worker's process."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.config import ServeConfig, transport_names
from protocol.errors import TandemError
from protocol.messages import Role
from protocol.sockets import ClusterKeys
from worker.stop import StopHandle

if TYPE_CHECKING:
    from deploy.ray_carrier import RayCarrier

log = logging.getLogger(__name__)

PARCELS, WATCH = "parcels", "watch"
CONCURRENCY = {"max_concurrency": 3, "concurrency_groups": {PARCELS: 1, WATCH: 1}}
"""The actor's threads: `run`, `stop` and `pid` at once, and one for each kind of call from a peer."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's process is told. It travels to the actor as msgpack, like every message of ours."""

    role: Role
    worker_id: str
    incarnation: str
    router_endpoint: str
    config: ServeConfig
    keys: ClusterKeys


class WorkerActor:
    """One worker. `run` occupies one of the actor's threads for the worker's whole life; `stop` ends it.

    Ray places and watches the process. With the `object_store` transport peers also call `deliver` and
    `until_ended`; without it no token and no block passes through these methods.
    """

    def __init__(self) -> None:
        self._stop = StopHandle()
        self._carrier: RayCarrier | None = None
        self._ended = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def run(self, encoded: bytes) -> str:
        """Serve as the `Launch` says. Returns "" when that ended as asked, else why it could not go on."""
        launch = msgspec.msgpack.decode(encoded, type=Launch)
        try:
            main = importlib.import_module(f"{launch.role}_worker.main")
            main.run(
                launch.config,
                launch.worker_id,
                launch.router_endpoint,
                launch.keys,
                self._stop,
                launch.incarnation,
                self._open_carrier(launch.config),
            )
        except TandemError as error:
            return str(error)
        except Exception as error:
            log.exception("the worker failed")
            return f"{type(error).__name__}: {error}".strip().splitlines()[0]
        finally:
            self._ended.set()
        return "" if self._stop.requested else "the router was lost"

    def stop(self) -> None:
        self._stop.stop()

    def deliver(self, kind: str, parcel: bytes, objects: list[Any]) -> bool:
        """Take a parcel of a peer; whether anybody was here for it."""
        return self._carrier is not None and self._carrier.receive(kind, parcel, objects)

    def until_ended(self) -> None:
        """Peers wait for this call's end, be it a return or the actor's death. They queue up for it."""
        self._ended.wait()

    def _open_carrier(self, config: ServeConfig) -> RayCarrier | None:
        if "object_store" not in transport_names(config):
            return None
        from deploy.ray_carrier import RayCarrier

        self._carrier = RayCarrier()
        return self._carrier
