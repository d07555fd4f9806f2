"""A server in miniature: the real router, and a prefill and a decode worker in their own processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from protocol.config import ServeConfig
from protocol.sockets import ClusterKeys
from router.server import RouterServer
from tests.worker.harness import RunningWorker, tiny_config

START_S = 60.0


class HttpServing:
    """Serves `model` over HTTP on a free port; `url` is ready when the constructor returns."""

    def __init__(self, model: Path, *, disaggregated: bool = True, **options: Any) -> None:
        self.config: ServeConfig = tiny_config(model, port=0, max_num_seqs=16, **options)
        self.keys = ClusterKeys.generate()
        self._router = RouterServer(self.config, self.keys)
        self.endpoint = self._router.worker_endpoint
        self.url = self._router.url
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._router.run, kwargs={"on_start": started.set}, daemon=True
        )
        self._thread.start()
        assert started.wait(START_S)
        self.http = httpx.Client(base_url=self.url, timeout=START_S)
        roles = ["prefill", "decode"] if disaggregated else ["decode"]
        # Only a worker's start needs the cluster that it belongs to: its keys and its router's endpoint.
        self.workers = [RunningWorker(self, role, f"{role}-0", self.config) for role in roles]  # type: ignore[arg-type]
        self.wait(
            lambda: len(self.worker_states()) == len(roles) and self.http.get("/ready").status_code == 200
        )

    def __enter__(self) -> HttpServing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._router.stop()
        self._router.stop()
        self._thread.join(START_S)
        for worker in self.workers:
            worker.stop()
        self.http.close()

    def worker_states(self) -> list[dict[str, Any]]:
        return self.http.get("/workers").json()["workers"]

    def wait(self, done: Callable[[], bool], timeout_s: float = START_S) -> None:
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            if done():
                return
            pause.wait(0.05)
        raise AssertionError("it does not come")

    def wait_empty(self) -> None:
        """Every block of every pool is free or cached, and nothing runs or waits."""

        def empty() -> bool:
            return all(
                worker["free_blocks"] + worker["cached_blocks"] == worker["total_blocks"]
                and worker["num_running"] + worker["num_waiting"] + worker["outstanding_requests"] == 0
                for worker in self.worker_states()
            )

        self.wait(empty)
