"""The Ray actor that is a worker's process."""

from __future__ import annotations

import importlib
import logging
import os

from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.messages import Role
from protocol.sockets import ClusterKeys
from worker.stop import StopHandle

log = logging.getLogger(__name__)


class WorkerActor:
    """One worker. `run` occupies one of the actor's threads for the worker's whole life; `stop` ends it.

    Ray places and watches the process, and nothing else: no token and no block passes through these methods.
    """

    def __init__(self) -> None:
        self._stop = StopHandle()

    def pid(self) -> int:
        return os.getpid()

    def run(
        self,
        role: Role,
        config: ServeConfig,
        worker_id: str,
        incarnation: str,
        router_endpoint: str,
        keys: ClusterKeys,
    ) -> str:
        """Serve. Returns "" when the worker ended as asked, else why it could not go on."""
        try:
            main = importlib.import_module(f"{role}_worker.main")
            main.run(config, worker_id, router_endpoint, keys, self._stop, incarnation)
        except TandemError as error:
            return str(error)
        except Exception as error:
            log.exception("the worker failed")
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return "" if self._stop.requested else "the router was lost"

    def stop(self) -> None:
        self._stop.stop()
