"""The launcher: a thread that starts Ray, runs the workers and ends both."""

from __future__ import annotations

import logging
import threading

from deploy.ray_cluster import RayCluster
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.sockets import ClusterKeys
from router.state import RouterState

log = logging.getLogger(__name__)


class StateView:
    """The router's state as the supervisor sees it, from its own thread."""

    def __init__(self, state: RouterState) -> None:
        self._state = state

    @property
    def endpoint(self) -> str:
        return self._state.link.endpoint

    def is_live(self, worker_id: str, incarnation: str) -> bool | None:
        worker = self._state.registry.current(worker_id, incarnation)
        return None if worker is None else worker.live

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        self._state.mark_dead(worker_id, incarnation, reason)


class Launcher(threading.Thread):
    """Lives as long as the cluster. `failure` says why it ended, unless it was asked to."""

    def __init__(self, config: ServeConfig, keys: ClusterKeys, router: StateView) -> None:
        super().__init__(name="launcher", daemon=True)
        self._config = config
        self._keys = keys
        self._router = router
        self._cluster = RayCluster(config)
        self._stop = threading.Event()
        self.all_ready = threading.Event()
        self.failure: str | None = None

    def stop(self) -> None:
        """End the workers and Ray. Any thread may call it."""
        self._stop.set()

    def run(self) -> None:
        try:
            self._cluster.start()
            self._supervise()
        except TandemError as error:
            self.failure = str(error)
        except Exception as error:
            log.exception("the launcher failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._cluster.stop()

    def remove_files(self) -> None:
        """What `run` does at its end; for a run that had to be cut short."""
        self._cluster.remove_files()

    def _supervise(self) -> None:
        if self._stop.is_set():
            return
        from deploy.supervisor import Supervisor

        Supervisor(
            self._config,
            self._keys,
            self._router,
            self._cluster.num_gpus(),
            is_local=self._cluster.is_local,
            stop=self._stop,
            all_ready=self.all_ready,
        ).run()
