"""Runs the real router in a thread, with its workers in processes."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import httpx

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from router.server import RouterServer
from tests.worker.harness import RunningWorker, tiny_config

START_S = 120.0
DEFAULTS = MappingProxyType({"max_num_seqs": 16, "worker_timeout": 15.0, "compile": "auto"})
"""The worker time-out is long enough for a busy machine. Tests of freezes set a shorter one."""
PAIR: Mapping[str, str] = MappingProxyType({"prefill-0": "", "decode-0": ""})
LOOKS = 7
"""Consecutive checks, 0.05 s apart: the last one follows a heartbeat that is newer than the first check."""


class HttpServing:
    """Serves `model` over HTTP on a free port. `url` is ready when the constructor returns.

    `workers` maps each worker's id, "role-number", to the fault that its process gets (`tests.worker.child`).
    """

    def __init__(self, model: Path, workers: Mapping[str, str] = PAIR, **options: Any) -> None:
        self.config: ServeConfig = tiny_config(model, port=0, **(DEFAULTS | options))
        self.keys = ClusterKeys.generate()
        self.router = RouterServer(self.config, self.keys)
        self.endpoints = self.router.worker_endpoints
        self.url = self.router.url
        started = threading.Event()
        # The preprocessor starts only when a request needs it: preparing grammars takes two CPU seconds.
        run = {"on_start": started.set, "prepares": False}
        self._thread = threading.Thread(target=self.router.run, kwargs=run, daemon=True)
        self._thread.start()
        assert started.wait(START_S)
        keys = self.config.api_keys
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=START_S, verify=False)
        self.workers = {worker_id: self._start(worker_id, fault) for worker_id, fault in workers.items()}
        self.wait(
            lambda: len(self.worker_states()) == len(workers) and self.http.get("/ready").status_code == 200
        )

    def _start(self, worker_id: str, fault: str) -> RunningWorker:
        role = worker_id.partition("-")[0]
        cluster: Any = self  # a worker's start needs only the keys and the router's endpoints
        return RunningWorker(cluster, role, worker_id, self.config, fault)

    def add(self, worker_id: str, fault: str = "") -> None:
        """Start one more worker, and wait until it serves."""
        self.workers[worker_id] = self._start(worker_id, fault)
        self.wait(lambda: worker_id in self.worker_states())

    def bury(self, worker_id: str) -> None:
        """Wait until a worker is dead, then tell the router, as the launcher does."""
        self.wait(lambda: not self.workers[worker_id].process.is_alive())
        incarnation = self.router.state.registry.named(worker_id).key.incarnation
        self.router.mark_dead(worker_id, incarnation, "it was killed")

    def __enter__(self) -> HttpServing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.router.stop()
        self.router.stop()
        self._thread.join(START_S)
        for worker in self.workers.values():
            if worker.process.is_alive():
                worker.signal(signal.SIGCONT)
            worker.tell_to_stop()  # tell all workers first, so that they end side by side
        for worker in self.workers.values():
            worker.join()
        self.http.close()

    def worker_states(self) -> dict[str, dict[str, Any]]:
        """Return the states that the router reports for its workers, by id. Silent workers are left out."""
        workers = self.http.get("/workers").json()["workers"]
        return {worker["id"]: worker for worker in workers if worker["lifecycle"] != "silent"}

    def counter(self, worker_id: str, name: str) -> float:
        """Return a worker's own counter."""
        return float(self.worker_states()[worker_id]["counters"][name])

    def metric(self, name: str, **labels: str) -> float:
        """Return the router's metric, summed over the labels that are not given."""
        samples = (s for family in self.router.state.metrics.registry.collect() for s in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def tokens(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Return the token ids of an answer: greedy, and past any end of text."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json={**body, "return_token_ids": True, **fields})
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the events of a streamed answer."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]

    def wait(self, done: Callable[[], bool], timeout_s: float = START_S) -> None:
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.05)):
            if done():
                return
            pause.wait(0.05)
        raise AssertionError("it does not come")

    def wait_empty(self) -> None:
        """Wait until every block of every pool is free or cached, and no request runs or waits."""
        looks = 0

        def empty() -> bool:
            nonlocal looks
            all_empty = all(
                worker["free_blocks"] + worker["cached_blocks"] == worker["total_blocks"]
                and worker["num_running"] + worker["num_waiting"] + worker["outstanding_requests"] == 0
                for worker in self.worker_states().values()
            )
            looks = looks + 1 if all_empty else 0
            return looks == LOOKS

        self.wait(empty)
