"""A decode worker without a model: each step takes a set time and repeats one more token of each prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import msgspec
import zmq

from messaging.sockets import ClusterKeys, connect_dealer
from protocol.codec import encode, router_to_worker
from protocol.ids import new_incarnation
from protocol.outputs import TokenOutput
from protocol.peers import PeerAddress
from protocol.requests import EngineRequest
from protocol.router_to_worker import Abort, Generate
from protocol.worker_to_router import Register, StepOutput, WorkerState

WORKER_ID = "decode-0"
HEARTBEAT_S = 0.25
TOTAL_BLOCKS = 2**20


class Stamps(msgspec.Struct):
    """Monotonic seconds: when each request came in, and when each step's tokens went out."""

    requests: list[float] = []
    steps: list[float] = []


@dataclass(slots=True)
class Running:
    request: EngineRequest
    num_sent: int = 0

    def advance(self) -> TokenOutput:
        prompt, position = self.request.prompt_token_ids, self.num_sent
        self.num_sent += 1
        is_last = self.num_sent == self.request.sampling.max_tokens
        return TokenOutput(
            request_id=self.request.request_id,
            token_ids=[prompt[position % len(prompt)]],
            position=position,
            finish_reason="length" if is_last else None,
            cached_tokens=0 if position == 0 else None,
        )


class SetRateWorker:
    """Speaks the real protocol over a real socket. `run()` serves the router until it is killed."""

    def __init__(
        self, endpoint: str, keys: ClusterKeys, step_s: float, vocab_size: int, max_model_len: int
    ) -> None:
        self.stamps = Stamps()
        self._step_s = step_s
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._incarnation = new_incarnation()
        self._running: dict[str, Running] = {}
        self._socket = connect_dealer(zmq.Context(), keys, endpoint, WORKER_ID)

    def run(self, stamps_path: Path) -> None:
        """The stamps are written whenever there is nothing to do."""
        self._send(self._registration())
        next_beat = next_step = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self._send(self._state())
                next_beat = now + HEARTBEAT_S
            if self._running and now >= next_step:
                self._step()
                next_step = max(next_step + self._step_s, now)
                if not self._running:
                    self._write_stamps(stamps_path)
            due = min(next_beat, next_step) if self._running else next_beat
            if self._socket.poll(max(0, ceil((due - time.monotonic()) * 1e3))):
                self._receive(self._socket.recv())

    def _write_stamps(self, path: Path) -> None:
        """Whole at once: it may be read at any moment."""
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(msgspec.json.encode(self.stamps))
        unfinished.replace(path)

    def _receive(self, raw: bytes) -> None:
        match router_to_worker.decode(raw):
            case Generate(request=request):
                self.stamps.requests.append(time.monotonic())
                self._running[request.request_id] = Running(request)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    self._running.pop(request_id, None)

    def _step(self) -> None:
        outputs = [running.advance() for running in self._running.values()]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.request_id]
        self.stamps.steps.append(time.monotonic())
        self._send(StepOutput(worker_id=WORKER_ID, incarnation=self._incarnation, outputs=outputs))

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))

    def _state(self) -> WorkerState:
        return WorkerState(
            worker_id=WORKER_ID,
            incarnation=self._incarnation,
            role="decode",
            num_running=len(self._running),
            total_blocks=TOTAL_BLOCKS,
            free_blocks=TOTAL_BLOCKS,
        )

    def _registration(self) -> Register:
        address = PeerAddress(worker_id=WORKER_ID, incarnation=self._incarnation, control="tcp://127.0.0.1:1")
        return Register(
            address=address,
            role="decode",
            model="set-rate",
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            eos_token_ids=[],
            state=self._state(),
        )
