"""The Ray actor that is a worker's process."""

from __future__ import annotations

import importlib
import logging
import os

import msgspec

from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.messages import Role
from protocol.sockets import ClusterKeys
from worker.stop import StopHandle

log = logging.getLogger(__name__)


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

    Ray places and watches the process, and nothing else: no token and no block passes through these methods.
    """

    def __init__(self) -> None:
        self._stop = StopHandle()

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
            )
        except TandemError as error:
            return str(error)
        except Exception as error:
            log.exception("the worker failed")
            return f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return "" if self._stop.requested else "the router was lost"

    def stop(self) -> None:
        self._stop.stop()
