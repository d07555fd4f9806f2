"""Runs real workers in separate processes on real sockets, with the test as the router."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from messaging.sockets import ClusterKeys, bind_router, start_authenticator
from protocol.codec import encode, worker_to_router
from protocol.config import ServeConfig
from protocol.ids import PeerAddress
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.roles import ROLES, Role
from protocol.router_to_worker import Abort, Generate, Redirect, Registered
from protocol.sampling import SamplingParams
from protocol.version import PROTOCOL
from protocol.worker_to_router import (
    AbsentRequests,
    HandoverFailed,
    KvEvents,
    Register,
    StepOutput,
    WorkerState,
)
from tests.processes import send_signal
from tests.worker.child import run_child

WAIT_S = 60.0
ROUTER = "router"
"""The router's incarnation."""


def tiny_config(model: Path, **changes: Any) -> ServeConfig:
    config = ServeConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        compile="off",
        placement="least_loaded",
        worker_threads=1,
        kv_cache_memory_bytes=4 * 1024 * 1024,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        handoff_timeout=5.0,
        log_level="warning",
    )
    return replace(config, **changes)


def request(request_id: str, prompt: list[int], max_tokens: int = 12, **sampling: Any) -> EngineRequest:
    params = {"temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **params),
    )


_processes = multiprocessing.get_context("forkserver")


class RunningWorker:
    """A worker's process, as the router sees it."""

    def __init__(
        self, cluster: Cluster, role: Role, worker_id: str, config: ServeConfig, fault: str = ""
    ) -> None:
        self.worker_id = worker_id
        self._cluster = cluster
        self._ours, theirs = _processes.Pipe()
        self.process = _processes.Process(
            target=run_child,
            args=(
                ROLES[role],
                msgspec.to_builtins(config),
                worker_id,
                cluster.endpoints,
                cluster.keys,
                theirs,
                fault,
            ),
            name=worker_id,
            daemon=True,
        )
        self.process.start()
        theirs.close()

    @property
    def address(self) -> PeerAddress:
        return self._cluster.registered[self.worker_id].address

    @property
    def state(self) -> WorkerState:
        """The newest heartbeat of this incarnation."""
        return self._cluster.states[self.address.incarnation]

    def counter(self, name: str) -> float:
        return self.state.counters[name]

    @property
    def used_blocks(self) -> int:
        return self.state.total_blocks - self.state.free_blocks - self.state.cached_blocks

    def tell_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._ours.send("stop")

    def stop(self) -> None:
        self.tell_to_stop()
        self.join()

    def ended_when_told(self) -> str:
        """Tell it to stop. Return why it ended: "" as told, else the error."""
        self._ours.send("stop")
        return self.ended_with()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.exitcode is None, f"{self.worker_id} ended with {self.process.exitcode}"
        assert self.process.pid is not None
        send_signal(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.join()

    def join(self, timeout_s: float = WAIT_S) -> None:
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            raise AssertionError(f"{self.worker_id} does not end")

    def ended_with(self) -> str:
        """Return why it ended: "" as told, else the error."""
        self.join()
        return str(self._ours.recv())


class Cluster:
    """The router's side of the sockets. Workers that it starts connect to all `endpoints`, its own first."""

    def __init__(self, keys: ClusterKeys | None = None, router: str = ROUTER) -> None:
        self.keys = keys or ClusterKeys.generate()
        self._router = router
        self.protocol = PROTOCOL
        """The protocol version that the router announces."""
        self.context: zmq.Context[Any] = zmq.Context()
        self._authenticator = start_authenticator(self.context, self.keys)
        self._socket, self.endpoint = bind_router(self.context, self.keys, "127.0.0.1")
        self.endpoints = [self.endpoint]
        self.registered: dict[str, Register] = {}
        self.states: dict[str, WorkerState] = {}
        self.outputs: dict[str, list[tuple[str, TokenOutput]]] = defaultdict(list)
        self._first_from: dict[str, str] = {}
        """The prefill worker of each split request. Its token is the first, even if it arrives later."""
        self.failed_handovers: dict[str, list[HandoverFailed]] = defaultdict(list)
        self.kv_events: dict[str, list[KvEvents]] = defaultdict(list)
        """KV events by incarnation."""
        self.steps: list[StepOutput] = []
        self.absent: list[str] = []
        """Ids of requests that a worker has reported as unknown."""
        self.workers: list[RunningWorker] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            worker.tell_to_stop()  # tell all workers first, so that they end side by side
        for worker in self.workers:
            worker.join()
        self.close()

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            self._authenticator.stop()
            self.context.destroy(linger=0)

    def start(self, role: Role, worker_id: str, config: ServeConfig, fault: str = "") -> RunningWorker:
        return self._await(self._launch(role, worker_id, config, fault))

    def start_pair(self, config: ServeConfig) -> tuple[RunningWorker, RunningWorker]:
        prefill = self._launch("prefill", "prefill-0", config)
        decode = self._launch("decode", "decode-0", config)
        return self._await(prefill), self._await(decode)

    def _launch(self, role: Role, worker_id: str, config: ServeConfig, fault: str = "") -> RunningWorker:
        self.registered.pop(worker_id, None)
        worker = RunningWorker(self, role, worker_id, config, fault)
        self.workers.append(worker)
        return worker

    def _await(self, worker: RunningWorker) -> RunningWorker:
        self.wait(lambda: worker.worker_id in self.registered or not worker.process.is_alive())
        assert worker.worker_id in self.registered, worker.ended_with()
        self.refresh(worker)
        return worker

    def send(self, worker_id: str, message: msgspec.Struct) -> None:
        self._socket.send_multipart([worker_id.encode(), encode(message)])

    def generate(
        self,
        worker: RunningWorker,
        request: EngineRequest,
        decode: PeerAddress | None = None,
        prefix: PeerAddress | None = None,
    ) -> None:
        if decode is not None:
            self._first_from[request.request_id] = worker.worker_id
        message = Generate(
            incarnation=worker.address.incarnation, request=request, decode=decode, prefix=prefix
        )
        self.send(worker.worker_id, message)

    def serve(self, worker: RunningWorker, request: EngineRequest, **by: PeerAddress | None) -> list[int]:
        """Run a request to its end, with another worker's help or without. Return its tokens."""
        self.generate(worker, request, **by)
        self.run(request.request_id)
        return self.tokens(request.request_id)

    def redirect(self, worker: RunningWorker, request_id: str, decode: PeerAddress | None) -> None:
        """Name another decode worker for the request that `worker` has computed."""
        if decode is None:
            self._first_from.pop(request_id, None)
        incarnation = worker.address.incarnation
        self.send(worker.worker_id, Redirect(incarnation=incarnation, request_id=request_id, decode=decode))

    def handover_failed(self, request_id: str) -> HandoverFailed:
        """Wait for the prefill worker's report of a failed hand-over, and return it."""
        self.wait(lambda: bool(self.failed_handovers[request_id]))
        return self.failed_handovers[request_id].pop(0)

    def abort(self, *request_ids: str) -> None:
        for worker in self.workers:
            self.send(worker.worker_id, Abort(request_ids=list(request_ids)))

    def wait(self, done: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Serve the sockets until `done`. Fails the test when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, "it does not come"
            if self._socket.poll(20):
                self._on_message(*self._socket.recv_multipart())

    def take_what_came(self) -> None:
        while self._socket.poll(0):
            self._on_message(*self._socket.recv_multipart())

    def _on_message(self, identity: bytes, raw: bytes) -> None:
        message = worker_to_router.decode(raw)
        match message:
            case Register():
                self.registered[message.address.worker_id] = message
                registered = Registered(
                    incarnation=message.address.incarnation, router=self._router, protocol=self.protocol
                )
                self.send(identity.decode(), registered)
            case WorkerState():
                self.states[message.incarnation] = message
            case KvEvents():
                self.kv_events[message.incarnation].append(message)
            case AbsentRequests():
                self.absent += message.request_ids
            case HandoverFailed():
                self.failed_handovers[message.request_id].append(message)
            case StepOutput():
                self.steps.append(message)
                for output in message.outputs:
                    self._on_output(message.worker_id, output)

    def _on_output(self, worker_id: str, output: TokenOutput) -> None:
        outputs = self.outputs[output.request_id]
        if output.token_ids and worker_id == self._first_from.get(output.request_id):
            outputs.insert(0, (worker_id, output))
        else:
            outputs.append((worker_id, output))

    def finished(self, request_id: str) -> bool:
        """Tell whether the request has ended and has the prefill worker's token, or an error in its place."""
        reasons = {output.finish_reason for _, output in self.outputs[request_id]} - {None}
        first_from = self._first_from.get(request_id)
        is_whole = first_from is None or first_from in self.sources(request_id)
        return bool(reasons) and (is_whole or bool(reasons & {"error", "abort"}))

    def run(self, *request_ids: str, timeout_s: float = WAIT_S) -> None:
        self.wait(lambda: all(self.finished(request_id) for request_id in request_ids), timeout_s)

    def tokens(self, request_id: str) -> list[int]:
        """Return the tokens in order, after checking that there is exactly one end."""
        outputs = [output for _, output in self.outputs[request_id]]
        assert [output.finish_reason is not None for output in outputs].count(True) == 1
        return [token for output in outputs for token in output.token_ids]

    def sources(self, request_id: str) -> list[str]:
        """Return the worker that sent each output."""
        return [worker_id for worker_id, _ in self.outputs[request_id]]

    def error(self, request_id: str) -> TokenOutput:
        last = self.outputs[request_id][-1][1]
        assert last.finish_reason == "error"
        return last

    def refresh(self, *workers: RunningWorker) -> None:
        """Wait for the messages in flight, and for two more heartbeats of each worker."""
        self.take_what_came()
        for _ in range(2):
            for worker in workers:
                self.states.pop(worker.address.incarnation, None)
            self.wait(lambda: all(worker.address.incarnation in self.states for worker in workers))

    def wait_empty(self, *workers: RunningWorker) -> None:
        """Wait until every block is free or cached again. The workers' states are fresh then."""
        self.refresh(*workers)
        self.wait(lambda: all(worker.used_blocks == 0 for worker in workers))
        self.refresh(*workers)
