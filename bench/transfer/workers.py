"""Real prefill and decode workers in processes of their own, with the benchmark in the router's place."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from types import TracebackType
from typing import Any

import msgspec
import psutil
import zmq

from bench.transfer.process import processes
from messaging.sockets import ClusterKeys, bind_router, start_authenticator
from protocol.codec import encode, worker_to_router
from protocol.config import ServeConfig
from protocol.peers import PeerAddress
from protocol.requests import EngineRequest
from protocol.roles import ROLES, Role
from protocol.router_to_worker import Generate, Registered
from protocol.sampling import SamplingParams
from protocol.worker_to_router import HandoverFailed, Register, StepOutput, WorkerState

START_S = 300.0
HEARTBEATS = 2
"""After as many, counters are those of now."""


class Cluster:
    """The router's side of the sockets. Times are those of `time.perf_counter()`."""

    def __init__(self) -> None:
        self.keys = ClusterKeys.generate()
        self.context: zmq.Context[Any] = zmq.Context()
        self._authenticator = start_authenticator(self.context, self.keys)
        self._socket, self._endpoint = bind_router(self.context, self.keys, "127.0.0.1")
        self._processes: dict[str, Any] = {}
        self._registered: dict[str, Register] = {}
        self._states: dict[str, list[WorkerState]] = defaultdict(list)
        self._tokens: dict[str, list[tuple[float, str]]] = defaultdict(list)
        self._num_requests = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        self._socket.close()
        self._authenticator.stop()
        self.context.destroy(linger=0)

    def start(self, *workers: tuple[Role, str, ServeConfig]) -> None:
        """Start workers (role, id, configuration), and wait until they serve."""
        for role, worker_id, config in workers:
            fields = msgspec.to_builtins(config)
            process = processes.Process(
                target=_run, args=(role, fields, worker_id, self._endpoint, self.keys), daemon=True
            )
            process.start()
            self._processes[worker_id] = process
        self._wait(lambda: {worker_id for _, worker_id, _ in workers} <= self._registered.keys(), START_S)

    def address(self, worker_id: str) -> PeerAddress:
        return self._registered[worker_id].address

    def vocab_size(self, worker_id: str) -> int:
        return self._registered[worker_id].vocab_size

    def cpu_seconds(self, *worker_ids: str) -> float:
        """What these workers' processes have used so far."""
        times = [psutil.Process(self._processes[name].pid).cpu_times() for name in worker_ids]
        return float(sum(each.user + each.system for each in times))

    def counters(self, worker_id: str) -> dict[str, float]:
        """A worker's counters as of now, those of its pairs summed; 0 for what has not happened."""
        self._states[worker_id].clear()
        self._wait(lambda: len(self._states[worker_id]) >= HEARTBEATS, 30.0)
        state = self._states[worker_id][-1]
        counters: dict[str, float] = defaultdict(float, state.counters)
        for pair in state.pairs:
            for name, value in pair.counters.items():
                counters[name] += value
        return counters

    def request(self, prompt: list[int], max_tokens: int) -> EngineRequest:
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(
            request_id=f"request-{self._num_requests}",
            prompt_token_ids=prompt,
            sampling=sampling,
            timeout_s=3600.0,
        )

    def generate(
        self, worker_id: str, prompt: list[int], max_tokens: int, decode: str | None = None
    ) -> list[float]:
        """Seconds until each token, from sending the request to a worker; `decode` gets it handed over."""
        request = self.request(prompt, max_tokens)
        message = Generate(
            incarnation=self.address(worker_id).incarnation,
            request=request,
            decode=None if decode is None else self.address(decode),
        )
        started = time.perf_counter()
        self._send(worker_id, message)
        self._wait(lambda: len(self._tokens[request.request_id]) >= max_tokens, 3600.0)
        return [at - started for at, _ in self._tokens.pop(request.request_id)]

    def rest(self, seconds: float) -> None:
        """Serve nothing but heartbeats for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._socket.poll(int(left * 1000) + 1):
                self._on_message(*self._socket.recv_multipart())

    def _send(self, worker_id: str, message: msgspec.Struct) -> None:
        self._socket.send_multipart([worker_id.encode(), encode(message)])

    def _wait(self, done: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer of the workers within {timeout_s:.0f} s")
            if self._socket.poll(1000):
                self._on_message(*self._socket.recv_multipart())
            else:
                self._check_alive()

    def _check_alive(self) -> None:
        for worker_id, process in self._processes.items():
            if not process.is_alive():
                raise RuntimeError(f"{worker_id} ended: {process.exitcode}")

    def _on_message(self, identity: bytes, raw: bytes) -> None:
        now = time.perf_counter()
        message = worker_to_router.decode(raw)
        match message:
            case Register():
                self._registered[message.address.worker_id] = message
                registered = Registered(incarnation=message.address.incarnation, router="bench")
                self._send(identity.decode(), registered)
            case WorkerState():
                self._states[message.worker_id].append(message)
            case HandoverFailed():
                raise RuntimeError(f"a hand-off failed: {message.reason}")
            case StepOutput():
                for output in message.outputs:
                    if output.error is not None:
                        raise RuntimeError(output.error)
                    self._tokens[output.request_id] += [(now, message.worker_id)] * len(output.token_ids)


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, vocab_size), k=length)


def _run(role: Role, fields: dict[str, Any], worker_id: str, endpoint: str, keys: ClusterKeys) -> None:
    """A worker's process."""
    from worker.launch import Launch
    from worker.process import run_worker
    from worker.stop import StopHandle

    config = msgspec.convert(fields, ServeConfig)
    launch = Launch(
        role=ROLES[role], worker_id=worker_id, router_endpoints=[endpoint], config=config, keys=keys
    )
    run_worker(launch, StopHandle())
