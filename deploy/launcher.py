"""The launcher: a thread that starts Ray, runs the workers and ends both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deploy.ray_cluster import RayCluster
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.sockets import ClusterKeys
from router.server import RouterServer

log = logging.getLogger(__name__)


class RouterView:
    """The router as the supervisor sees it, from its own thread."""

    def __init__(self, server: RouterServer) -> None:
        self._server = server
        self.endpoint = server.worker_endpoint
        self.mark_dead = server.mark_dead

    def is_live(self, worker_id: str, incarnation: str) -> bool | None:
        """Whether the router hears from this incarnation; None while it is not registered."""
        worker = self._server.state.registry.current(worker_id, incarnation)
        return None if worker is None else worker.live


class Launcher(threading.Thread):
    """Lives as long as the cluster. `failure` says why it ended, unless it was asked to.

    `on_ready` is called when every worker has registered, `on_failure` when the cluster ends by itself; both
    in this thread.
    """

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        server: RouterServer,
        on_ready: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(name="launcher", daemon=True)
        self._config = config
        self._keys = keys
        self._server = server
        self._router = RouterView(server)
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._cluster = RayCluster(config)
        self._stop_requested = threading.Event()
        self.failure: str | None = None

    def stop(self) -> None:
        """End the workers and Ray. Any thread may call it."""
        self._stop_requested.set()

    def run(self) -> None:
        try:
            self._cluster.start()
            self._server.restore_signals()  # Ray's own handler prints a trace of the C stack at SIGTERM
            self._supervise()
        except TandemError as error:
            self.failure = str(error)
        except Exception as error:
            log.exception("the launcher failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            if self.failure is not None and not self._stop_requested.is_set():
                self._on_failure()
            self._cluster.stop()

    def remove_files(self) -> None:
        """What `run` does at its end; for a run that had to be cut short."""
        self._cluster.remove_files()

    def _supervise(self) -> None:
        if self._stop_requested.is_set():
            return
        from deploy.supervisor import Supervisor

        Supervisor(
            self._config,
            self._keys,
            self._router,
            num_gpus=self._cluster.num_gpus(),
            is_local=self._cluster.is_local,
            stop=self._stop_requested,
            on_ready=self._on_ready,
        ).run()
