"""The launcher: a thread that starts Ray, runs the workers and ends both."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from deploy.launch import forks_workers
from deploy.ray_cluster import HeadWatch, RayCluster
from deploy.resources import choose_threads, thread_environment
from deploy.routers.messages import Routers
from deploy.template.client import TemplateClient
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import TandemError
from worker.cores import host_cores

log = logging.getLogger(__name__)


class Launcher(threading.Thread):
    """Lives as long as the cluster. `failure` says why the cluster ended, unless `stop` was called.

    Calls `on_ready` when every worker has registered, and `on_failure` when the cluster ends by itself:
    twice if running requests are lost.
    """

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        server: Routers,
        cluster: RayCluster,
        on_ready: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(name="launcher", daemon=True)
        self._config = config
        self._keys = keys
        self._server = server
        self._on_ready = on_ready
        self._on_failure = on_failure
        self.cluster = cluster
        threads, _ = choose_threads(config, host_cores())
        self._template = TemplateClient(self.cluster.namespace, thread_environment(threads), own_stderr=False)
        self._stop_requested = threading.Event()
        self._watch: HeadWatch | None = None
        self.failure: str | None = None

    def stop(self) -> None:
        """End the workers and Ray. Any thread may call it."""
        self._stop_requested.set()

    def run(self) -> None:
        try:
            if self.cluster.is_local and forks_workers(self._config):
                self._template.connect()
                self._template.preload(self._config)  # imports and loading take as long as Ray's start
            self.cluster.start(self._stop_requested)
            if self.cluster.head is not None:
                self._watch = HeadWatch(*self.cluster.head, self._on_head_lost)
                self._watch.start()
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
            if self._watch is not None:
                self._watch.stop()
            self.cluster.stop()
            self._template.close()

    def _on_head_lost(self, reason: str) -> None:
        """Stop the server at once, from the watch's thread: the launcher's may hang in Ray."""
        self.failure, self.cluster.has_died = reason, True
        self._stop_requested.set()
        self._on_failure()
        self._on_failure()

    def _supervise(self) -> None:
        if self._stop_requested.is_set():
            return
        from deploy.supervisor import Supervisor

        Supervisor(
            self._config, self._keys, self._server, self.cluster, self._stop_requested, self._on_ready
        ).run()
