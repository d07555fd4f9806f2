"""Two routers in threads, and fake workers that serve both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from deploy.routers.pool import RouterPorts
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from tests.router.conftest import RunningRouter
from tests.router.fake_worker import FakeWorker
from tests.router.router_clients import eventually


class TwoRouters:
    def __init__(self, model: Path, **options: Any) -> None:
        config = ServeConfig(
            **{"model": str(model), "port": 0, "placement": "least_loaded", "router_replicas": 2, **options}
        )
        self._ports = RouterPorts(config, "127.0.0.1")
        self._config = replace(config, port=self._ports.port)
        self.keys = ClusterKeys.generate()
        self.url = f"http://127.0.0.1:{self._ports.port}"
        self.routers = [self._make(index) for index in range(2)]
        self.workers: list[FakeWorker] = []

    def __enter__(self) -> TwoRouters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for router in self.routers:
            router.close()
        for worker in self.workers:
            worker.stop()
        self._ports.close()

    def _make(self, index: int) -> RunningRouter:
        return RunningRouter(self._config, self.keys, self._ports.places[index])

    def add_worker(self, worker_id: str, **options: Any) -> FakeWorker:
        endpoints = [f"tcp://127.0.0.1:{place.link_port}" for place in self._ports.places]
        role = worker_id.partition("-")[0]
        worker = FakeWorker(endpoints, self.keys, worker_id, role, **options).start()
        self.workers.append(worker)
        return worker

    def each(self, done: Callable[[RunningRouter], Any]) -> None:
        """Wait until `done` holds for both routers."""
        eventually(lambda: all(done(router) for router in self.routers))

    def restart(self, index: int) -> RunningRouter:
        """Restart a router as a new incarnation in the same place. The old one's connections break."""
        self.routers[index].close()
        self.routers[index] = self._make(index)
        return self.routers[index]
