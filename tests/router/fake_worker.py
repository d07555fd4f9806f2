"""A worker that speaks the real protocol over real sockets, with tokens from a script."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from messaging.sockets import ClusterKeys, connect_dealer
from protocol.codec import encode, router_to_worker
from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.ids import PeerAddress, new_incarnation
from protocol.outputs import (
    ErrorKind,
    FinishReason,
    RequestTiming,
    TokenLogprobs,
    TokenOutput,
    logprobs_pages,
)
from protocol.requests import Adapter, EngineRequest
from protocol.router_to_worker import (
    Abort,
    CallRoll,
    Generate,
    Leave,
    LoadAdapter,
    PeerGone,
    Prefetch,
    PrepareToLeave,
    Redirect,
    Registered,
    Replan,
    UnloadAdapter,
    Unregistered,
)
from protocol.speculation import SpeculationState
from protocol.worker_to_router import (
    AbsentRequests,
    AdapterLoaded,
    HandoverFailed,
    Leaving,
    PairState,
    Prefetched,
    Register,
    StepOutput,
    WorkerState,
)


def echo_script(request: EngineRequest) -> list[int]:
    """Repeat the prompt endlessly."""
    prompt = request.prompt_token_ids
    return [prompt[i % len(prompt)] for i in range(request.sampling.max_tokens)]


def embedding_of(token_ids: list[int]) -> bytes:
    """Return the first and the last token as a vector of two values, scaled to length one."""
    ends = token_ids[0], token_ids[-1]
    return struct.pack("<2f", *(end / math.hypot(*ends) for end in ends))


class Job:
    """A request that the worker runs, one token per step, for the router at the other end of `line`."""

    def __init__(self, message: Generate, tokens: list[int], finish_reason: FinishReason, line: int) -> None:
        self.line = line
        self.request = message.request
        self.decode = message.decode
        self.tokens = tokens[: message.request.sampling.max_tokens]
        self.finish_reason: FinishReason = (
            finish_reason if len(tokens) <= message.request.sampling.max_tokens else "length"
        )
        self.start = len(message.request.output_token_ids)
        self.sent = self.start


@dataclass(eq=False)
class FakeWorker:
    """Runs in a thread, for the routers at all `endpoints`, in the same order for all workers.

    `script(request)` yields the tokens, and `step_s` is the time between steps.

    The event `hold` stops token output while it is set, and `mute` stops heartbeats. `peers` maps worker ids
    to fake decode workers for hand-offs, which do not happen while `keep` is set. A job stops after
    `stall_after` output tokens. With `rejected_per_step`, all but the last of a step's tokens were drafted,
    and this many more were rejected; all drafted tokens except the last `not_predicted` came from the
    prediction. A prefetch is answered by `prefetches`, or not at all if it is None. `generated`, `aborted`,
    `redirects` and `prefetched` record what the worker received.
    """

    endpoints: list[str]
    keys: ClusterKeys
    worker_id: str = "decode-0"
    role: str = "decode"
    script: Callable[[EngineRequest], list[int]] = echo_script
    finish_reason: FinishReason = "length"
    step_s: float = 0.001
    tokens_per_step: int = 1
    rejected_per_step: int | None = None
    not_predicted: int = 0
    peers: dict[str, FakeWorker] = field(default_factory=dict)
    vocab_size: int = 600
    max_model_len: int = 512
    heartbeat_s: float = 0.1
    counters: dict[str, float] = field(default_factory=dict)
    cached_tokens: int = 5
    pairs: list[PairState] = field(default_factory=list)
    costs: StepCosts = UNKNOWN_COSTS
    stall_after: int = 2**31
    speculation: SpeculationState | None = None
    first_adapters: list[Adapter] = field(default_factory=list)
    adapter_error: str | None = ""
    """Why no adapter can be loaded. None means that the worker does not answer."""
    adapter_error_kind: ErrorKind = "invalid"
    adapter_digest: str = "a" * 32
    """The digest of adapters that it loads."""
    eos_token_id: int = 0
    stalled_s: float = 0.0
    """The time for which its loop has been stuck, as reported in heartbeats."""
    prefetches: bool | None = True

    def __post_init__(self) -> None:
        self.incarnation = new_incarnation()
        self.adapters = {adapter.name: adapter.digest for adapter in self.first_adapters}
        self.hold, self.mute, self.keep = (threading.Event() for _ in range(3))
        self.registered = threading.Event()
        self.has_left = threading.Event()
        """Set when all routers have released it."""
        self.generated: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.redirects: list[Redirect] = []
        self.prefetched: list[str] = []
        self.replans: list[Replan] = []
        self.gone: list[tuple[str, str]] = []
        """Workers, with incarnations, that it was told are lost."""
        self.jobs: dict[str, Job] = {}
        self.held: dict[str, Job] = {}
        self._confirmed: set[int] = set()
        self._let_go: set[int] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._outbox: list[bytes] = []
        self._adopted: list[Job] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> FakeWorker:
        self._thread.start()
        assert self.registered.wait(30), "the router did not answer the registration"
        self._heart.start()
        return self

    def stop(self) -> None:
        """Disappear at once, like a killed process."""
        self._stop.set()
        self._thread.join()
        if self._heart.is_alive():
            self._heart.join()
        self._context.term()

    def post(self, raw: bytes) -> None:
        """Send any bytes to all routers."""
        with self._lock:
            self._outbox.append(raw)

    def adopt(self, job: Job) -> None:
        """Take over a request from a prefill worker."""
        with self._lock:
            self._adopted.append(job)

    def fail_handover(self, request_id: str, kind: str, *, manifest_sent: bool = False) -> None:
        """Tell the router that the decode worker did not take a request."""
        job = self.held.get(request_id) or self.jobs[request_id]
        assert job.decode is not None
        self.post(self.handover_failed(request_id, job.decode.incarnation, kind, manifest_sent))

    def handover_failed(
        self, request_id: str, decode: str, kind: str, manifest_sent: bool, **changes: str
    ) -> bytes:
        reason = "it did not work"
        told: dict[str, Any] = {"error_kind": kind, "reason": reason, "manifest_sent": manifest_sent}
        names = self._names | changes
        return encode(HandoverFailed(request_id=request_id, decode_incarnation=decode, **names, **told))

    @property
    def _names(self) -> dict[str, Any]:
        return {"worker_id": self.worker_id, "incarnation": self.incarnation}

    def state(self) -> WorkerState:
        return WorkerState(
            **self._names,
            role=self.role,
            stalled_s=self.stalled_s,
            num_running=len(self.jobs),
            total_blocks=100,
            free_blocks=80,
            cached_blocks=10,
            prefix_query_tokens=7,
            prefix_hit_tokens=3,
            counters=self.counters,
            pairs=self.pairs,
            costs=self.costs,
            speculation=self.speculation,
            transports={"decode-0": "shm"} if self.role == "prefill" else {},
        )

    def register_message(self) -> Register:
        return Register(
            host="a-machine",
            pid=4711,
            address=PeerAddress(**self._names, control="tcp://127.0.0.1:1"),
            role=self.role,
            model="test-model",
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=[self.eos_token_id],
            state=self.state(),
            start_up={"attention": "fake"},
            adapters=self.first_adapters,
        )

    def _connect(self, identity: str) -> list[zmq.Socket[bytes]]:
        return [connect_dealer(self._context, self.keys, end, identity) for end in self.endpoints]

    def _beat(self) -> None:
        sockets = self._connect(self.worker_id + "/hb")
        while not self._stop.wait(self.heartbeat_s):
            if not self.mute.is_set():
                for socket in sockets:
                    socket.send(encode(self.state()))
        for socket in sockets:
            socket.close()

    def _run(self) -> None:
        self._sockets = self._connect(self.worker_id)
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        self._send_all(self.register_message())
        next_step = time.monotonic()
        while not self._stop.is_set():
            with self._lock:
                outbox, self._outbox = self._outbox, []
                adopted, self._adopted = self._adopted, []
            for raw in outbox:
                for socket in self._sockets:
                    socket.send(raw)
            for job in adopted:
                self.jobs[job.request.request_id] = job
            poller.poll(1 if self.jobs else 5)  # ms; changes by the test are noticed in time
            for line, socket in enumerate(self._sockets):
                while socket.poll(0):
                    self._receive(router_to_worker.decode(socket.recv()), line)
            if self.jobs and not self.hold.is_set() and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.step_s
                lines = {request_id: job.line for request_id, job in self.jobs.items()}
                by_line: dict[int, list[TokenOutput]] = defaultdict(list)
                for output in self._step():
                    by_line[lines.get(output.request_id, 0)].append(output)
                for line, outputs in by_line.items():
                    self._sockets[line].send(encode(self._step_output(outputs)))
        for socket in self._sockets:
            socket.close()

    def _send_all(self, message: msgspec.Struct) -> None:
        for socket in self._sockets:
            socket.send(encode(message))

    def _receive(self, message: object, line: int) -> None:
        match message:
            case Registered():
                self._confirmed.add(line)
                if len(self._confirmed) == len(self.endpoints):
                    self.registered.set()
            case Unregistered():
                self._sockets[line].send(encode(self.register_message()))
            case PrepareToLeave():
                following = message.next_incarnation
                self._send_all(Leaving(**self._names, role=message.role, next_incarnation=following))
            case Leave():
                self._let_go.add(line)
                if len(self._let_go) == len(self.endpoints):
                    self.has_left.set()
            case Prefetch():
                self.prefetched.append(message.request.request_id)
                if self.prefetches is not None:
                    self._sockets[line].send(encode(self.prefetch_answer(self.prefetches)))
            case Generate():
                assert message.incarnation == self.incarnation
                self.generated.append(message.request)
                tokens = self.script(message.request)
                self.jobs[message.request.request_id] = Job(message, tokens, self.finish_reason, line)
            case Abort():
                self.aborted.extend(message.request_ids)
                for request_id in message.request_ids:
                    self.jobs.pop(request_id, None)
                    self.held.pop(request_id, None)
            case CallRoll():
                assert message.incarnation == self.incarnation
                self._answer_roll_call(message.request_ids, line)
            case Redirect():
                assert message.incarnation == self.incarnation
                self._redirect(message)
                self.redirects.append(message)
            case Replan():
                assert message.incarnation == self.incarnation
                self.replans.append(message)
            case LoadAdapter():
                self._load_adapter(message, line)
            case UnloadAdapter():
                self.adapters.pop(message.name, None)
            case PeerGone():
                assert message.incarnation == self.incarnation
                self.gone.append((message.worker_id, message.gone))

    def _load_adapter(self, message: LoadAdapter, line: int) -> None:
        if self.adapter_error is None:
            return
        digest = "" if self.adapter_error else message.digest or self.adapter_digest
        if digest:
            self.adapters[message.name] = digest
        error: dict[str, Any] = {"error": self.adapter_error, "error_kind": self.adapter_error_kind}
        answer = AdapterLoaded(**self._names, name=message.name, digest=digest, **error)
        self._sockets[line].send(encode(answer))

    def prefetch_answer(self, complete: bool) -> Prefetched:
        """Answer the newest `Prefetch`."""
        return Prefetched(**self._names, request_id=self.prefetched[-1], complete=complete)

    def _answer_roll_call(self, request_ids: list[str], line: int) -> None:
        with self._lock:
            here = {*self.jobs, *self.held, *(job.request.request_id for job in self._adopted)}
        absent = [request_id for request_id in request_ids if request_id not in here]
        if absent:
            self._sockets[line].send(encode(AbsentRequests(**self._names, request_ids=absent)))

    def _redirect(self, message: Redirect) -> None:
        job = self.held.pop(message.request_id, None)
        if job is not None:
            job.decode = message.decode
            self._hand_over(job)
        elif message.request_id in self.jobs:
            self.jobs[message.request_id].decode = message.decode
        else:
            gone = TokenOutput(
                request_id=message.request_id,
                token_ids=[],
                finish_reason="error",
                error_kind="worker_lost",
                error="it was handed over",
            )
            self.post(encode(self._step_output([gone])))

    def _hand_over(self, job: Job) -> None:
        """Hand a job over to the decode worker, or keep it to run here, or wait."""
        if job.decode is None:
            self.jobs[job.request.request_id] = job
        elif self.keep.is_set():
            self.held[job.request.request_id] = job
        else:
            peer, job.decode = self.peers[job.decode.worker_id], None
            peer.adopt(job)

    def _step(self) -> list[TokenOutput]:
        going = [job for job in self.jobs.values() if job.sent < self.stall_after]
        return [self._advance(job) for job in going]

    def _step_output(self, outputs: list[TokenOutput]) -> StepOutput:
        return StepOutput(**self._names, outputs=outputs)

    def _advance(self, job: Job) -> TokenOutput:
        first = job.sent == job.start
        tokens = job.tokens[job.sent : job.sent + (1 if job.decode else self.tokens_per_step)]
        start = job.sent
        job.sent += len(tokens)
        finished = job.sent >= len(job.tokens)
        sampling = job.request.sampling
        if finished:
            del self.jobs[job.request.request_id]
        elif job.decode is not None:
            del self.jobs[job.request.request_id]
            self._hand_over(job)
        stop_token_id = None
        if finished and job.finish_reason == "stop" and tokens[-1] in sampling.stop_token_ids:
            stop_token_id = tokens[-1]
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self.logprob(token, start + i, sampling.logprobs) for i, token in enumerate(tokens)]
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt = job.request.prompt_token_ids
            rest = [self.logprob(token, i, sampling.prompt_logprobs) for i, token in enumerate(prompt[1:], 1)]
            prompt_logprobs = logprobs_pages([None, *rest])
        drafted = 0 if self.rejected_per_step is None else len(tokens) - 1 + self.rejected_per_step
        return TokenOutput(
            request_id=job.request.request_id,
            token_ids=tokens,
            position=start,
            finish_reason=job.finish_reason if finished else None,
            stop_token_id=stop_token_id,
            logprobs=logprobs,
            embedding=embedding_of(job.request.prompt_token_ids) if sampling.embeds else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens if first else None,
            timing=RequestTiming(queue_s=0.001, prefill_s=0.002) if first else None,
            accepted_tokens=0 if self.rejected_per_step is None else len(tokens) - 1,
            drafted_tokens=drafted,
            predicted_tokens=drafted - self.not_predicted if drafted else 0,
        )

    def logprob(self, token: int, position: int, num_top: int) -> TokenLogprobs:
        """Compute a made-up log-probability from the arguments. The token itself has rank 1."""
        top = [(token + i) % self.vocab_size for i in range(num_top)]
        values = [-0.5 - i - position / 1000 for i in range(num_top)]
        return TokenLogprobs(-0.5 - position / 1000, 1, top, values)
