"""What runs in a test worker's process. Preloaded by the fork server, so that a worker starts at once."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import transformers.models.llama.modeling_llama

import worker.heartbeat
from decode_worker.loop import DecodeLoop
from engine.engine import StepResult
from prefill_worker.loop import PrefillLoop
from protocol.config import ServeConfig
from protocol.messages import Role
from protocol.sockets import ClusterKeys
from worker.loop import WorkerLoop
from worker.process import run_worker
from worker.stop import StopHandle

assert transformers.models.llama.modeling_llama


def run_child(
    role: Role,
    config: dict[str, Any],
    worker_id: str,
    endpoint: str,
    keys: ClusterKeys,
    pipe: Connection,
    fault: str,
) -> None:
    """Be a worker until the pipe says "stop" or closes; then say how it ended."""
    worker.heartbeat.HEARTBEAT_INTERVAL_S = 0.05
    handle = StopHandle()

    def make_loop(*parts: Any) -> WorkerLoop:
        loop = (PrefillLoop if role == "prefill" else DecodeLoop)(*parts)
        if fault:
            break_steps(loop, int(fault))
        return loop

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        handle.stop()

    threading.Thread(target=listen, daemon=True).start()
    checked = msgspec.convert(config, ServeConfig)
    try:
        run_worker(make_loop, role, checked, worker_id, endpoint, keys, handle)
        reason = ""
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        pipe.send(reason)


def break_steps(loop: WorkerLoop, times: int) -> None:
    """Let the engine's first `times` steps fail."""
    step = loop.engine.step
    left = times

    def failing_step() -> StepResult:
        nonlocal left
        if left > 0:
            left -= 1
            raise RuntimeError("a fault that the test put in")
        return step()

    loop.engine.step = failing_step  # type: ignore[method-assign]
