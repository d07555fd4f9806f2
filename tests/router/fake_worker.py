"""A worker that speaks the real protocol over real sockets; its tokens come from a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import zmq

from protocol.codec import encode, router_to_worker
from protocol.ids import new_incarnation
from protocol.messages import (
    Abort,
    EngineRequest,
    Generate,
    PeerAddress,
    Register,
    Registered,
    RequestTiming,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
    WorkerState,
)
from protocol.sockets import ClusterKeys, connect_dealer

MAX_MODEL_LEN = 512


def echo_script(request: EngineRequest) -> list[int]:
    """The prompt, again and again."""
    prompt = request.prompt_token_ids
    return [prompt[i % len(prompt)] for i in range(request.sampling.max_tokens)]


class Job:
    """A request that the worker runs, one token a step."""

    def __init__(self, message: Generate, tokens: list[int], finish_reason: str) -> None:
        self.request = message.request
        self.decode = message.decode
        self.tokens = tokens[: message.request.sampling.max_tokens]
        self.finish_reason = finish_reason if len(tokens) <= message.request.sampling.max_tokens else "length"
        self.sent = 0


class FakeWorker:
    """Runs in a thread. `script(request)` gives the tokens; `step_s` is the time between steps.

    `hold` (an event) stops token output while it is set, `mute` the heartbeats; `peers` maps worker ids to
    fake decode workers, for the hand-off. Everything received is kept in `generated` and `aborted`.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClusterKeys,
        worker_id: str = "decode-0",
        role: str = "decode",
        *,
        script: Callable[[EngineRequest], list[int]] = echo_script,
        finish_reason: str = "length",
        step_s: float = 0.001,
        tokens_per_step: int = 1,
        peers: dict[str, FakeWorker] | None = None,
        vocab_size: int = 600,
        max_model_len: int = MAX_MODEL_LEN,
        heartbeat_s: float = 0.1,
        counters: dict[str, float] | None = None,
    ) -> None:
        self.worker_id, self.role = worker_id, role
        self.incarnation = new_incarnation()
        self.script, self.finish_reason = script, finish_reason
        self.step_s, self.tokens_per_step = step_s, tokens_per_step
        self.peers = peers or {}
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.heartbeat_s = heartbeat_s
        self.counters = counters or {}
        self.eos_token_id = 0
        self.hold = threading.Event()
        self.mute = threading.Event()
        self.registered = threading.Event()
        self.generated: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.lifecycle = "ready"
        self._endpoint, self._keys = endpoint, keys
        self._context = zmq.Context()
        self._outbox: list[bytes] = []
        self._adopted: list[Job] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> FakeWorker:
        self._thread.start()
        assert self.registered.wait(10), "the router did not answer the registration"
        self._heart.start()
        return self

    def stop(self) -> None:
        """Gone at once, like a killed process."""
        self._stop.set()
        self._thread.join()
        if self._heart.is_alive():
            self._heart.join()
        self._context.term()

    def post(self, raw: bytes) -> None:
        """Send any bytes to the router."""
        with self._lock:
            self._outbox.append(raw)

    def adopt(self, job: Job) -> None:
        """A prefill worker hands a request over."""
        with self._lock:
            self._adopted.append(job)

    def state(self) -> WorkerState:
        return WorkerState(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            lifecycle=self.lifecycle,
            num_running=len(self.jobs),
            total_blocks=100,
            free_blocks=80,
            cached_blocks=10,
            prefix_query_tokens=7,
            prefix_hit_tokens=3,
            counters=self.counters,
            transports={"decode-0": "shm"} if self.role == "prefill" else {},
        )

    def register_message(self) -> Register:
        return Register(
            address=PeerAddress(
                worker_id=self.worker_id, incarnation=self.incarnation, control="tcp://127.0.0.1:1"
            ),
            role=self.role,
            model="test-model",
            max_model_len=self.max_model_len,
            block_size=16,
            vocab_size=self.vocab_size,
            eos_token_ids=[self.eos_token_id],
            state=self.state(),
            start_up={"attention": "fake"},
        )

    def _beat(self) -> None:
        socket = connect_dealer(self._context, self._keys, self._endpoint, self.worker_id + "/hb")
        while not self._stop.wait(self.heartbeat_s):
            if not self.mute.is_set():
                socket.send(encode(self.state()))
        socket.close()

    def _run(self) -> None:
        socket = connect_dealer(self._context, self._keys, self._endpoint, self.worker_id)
        socket.send(encode(self.register_message()))
        next_step = time.monotonic()
        while not self._stop.is_set():
            with self._lock:
                outbox, self._outbox = self._outbox, []
                adopted, self._adopted = self._adopted, []
            for raw in outbox:
                socket.send(raw)
            for job in adopted:
                self.jobs[job.request.request_id] = job
            if socket.poll(1):
                while socket.poll(0):
                    self._receive(router_to_worker.decode(socket.recv()))
            if self.jobs and not self.hold.is_set() and time.monotonic() >= next_step:
                next_step = time.monotonic() + self.step_s
                outputs = self._step()
                if outputs:
                    socket.send(
                        encode(
                            StepOutput(
                                worker_id=self.worker_id, incarnation=self.incarnation, outputs=outputs
                            )
                        )
                    )
        socket.close()

    def _receive(self, message: object) -> None:
        match message:
            case Registered():
                self.registered.set()
            case Generate():
                assert message.incarnation == self.incarnation
                self.generated.append(message.request)
                tokens = self.script(message.request)
                self.jobs[message.request.request_id] = Job(message, tokens, self.finish_reason)
            case Abort():
                self.aborted.extend(message.request_ids)
                for request_id in message.request_ids:
                    self.jobs.pop(request_id, None)

    def _step(self) -> list[TokenOutput]:
        return [self._advance(job) for job in list(self.jobs.values())]

    def _advance(self, job: Job) -> TokenOutput:
        first = job.sent == 0
        tokens = job.tokens[job.sent : job.sent + (1 if job.decode else self.tokens_per_step)]
        start = job.sent
        job.sent += len(tokens)
        finished = job.sent >= len(job.tokens)
        sampling = job.request.sampling
        if finished:
            del self.jobs[job.request.request_id]
        elif job.decode is not None:
            del self.jobs[job.request.request_id]
            peer, job.decode = self.peers[job.decode.worker_id], None
            peer.adopt(job)
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
            prompt_logprobs = [None, *rest]
        return TokenOutput(
            request_id=job.request.request_id,
            token_ids=tokens,
            finish_reason=job.finish_reason if finished else None,
            stop_token_id=stop_token_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=5 if first else None,
            timing=RequestTiming(queue_s=0.001, prefill_s=0.002) if first else None,
        )

    def logprob(self, token: int, position: int, num_top: int) -> TokenLogprobs:
        """Made up, but a function of its arguments; the token itself has rank 1."""
        top = [(token + i) % self.vocab_size for i in range(num_top)]
        values = [-0.5 - i - position / 1000 for i in range(num_top)]
        return TokenLogprobs(-0.5 - position / 1000, 1, top, values)
