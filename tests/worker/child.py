"""Runs a worker in a test's process, with faults."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import pkgutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

import engine.step.profiling
import worker.fetch
import worker.heartbeat
import worker.link
import worker.setup
from engine.step.live_sequences import StepResult
from engine.step.scheduler import ScheduledStep
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.roles import RoleSpec
from tests.engine.parallel_child import join_of
from worker.launch import Launch, StopHandle
from worker.loop import WorkerLoop
from worker.process import run_worker


def run_child(
    role: RoleSpec,
    config: dict[str, Any],
    worker_id: str,
    endpoints: list[str],
    keys: ClusterKeys,
    pipe: Connection,
    fault: str,
) -> None:
    """Run a worker until the pipe says "stop" or closes. Then report how it ended.

    `fault` is a list joined by "+". "fail:N" lets the first N steps fail. "slow:S" makes every step S seconds
    slower. "gloo" gives ranks KV pools of their own, as on GPUs.
    "idle:S" closes connections to peers after S unused seconds. "fetch:S" gives up a prefix of which
    no block came for S seconds. "KILL:before:METHOD:N" sends the process this signal before (or after) the
    N-th call of a method of the loop or its parts; STOP works alike. "block:..." and "spin:..." make the loop
    wait or compute there until SIGUSR1.
    """
    engine.step.profiling._RUNS = 1  # hundreds of workers start
    worker.heartbeat.HEARTBEAT_INTERVAL_S = 0.05
    worker.heartbeat.ROUTER_GRACE_S = 1.0
    worker.fetch.FETCH_TIMEOUT_S = 1.0
    handle = StopHandle()
    checked = msgspec.convert(config, ServeConfig)
    faulty = msgspec.structs.replace(role, loop=f"{__name__}:make_faulty_loop")
    launch = Launch(role=faulty, worker_id=worker_id, router_endpoints=endpoints, config=checked, keys=keys)
    if "gloo" in fault:
        worker.setup.join_by = lambda device, size: join_of("gloo", size)
    leader = worker.setup.fork_ranks(launch, lambda _: pipe.close())
    faulthandler.enable()
    faulthandler.dump_traceback_later(50, exit=False)

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()
        handle.stop()

    threading.Thread(target=listen, daemon=True).start()
    global faulty_loop
    faulty_loop = role.loop, fault
    try:
        run_worker(launch, handle, leader=leader)
        reason = ""
    except Exception as error:
        traceback.print_exc()  # not every test reads the reason
        reason = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        pipe.send(reason)


faulty_loop = "", ""
"""The loop's class that `make_faulty_loop` uses, and its faults."""


def make_faulty_loop(*parts: Any) -> WorkerLoop:
    entry, fault = faulty_loop
    loop: WorkerLoop = pkgutil.resolve_name(entry)(*parts)
    for part in filter(None, fault.split("+")):
        put_in(loop, *part.split(":"))
    return loop


def put_in(loop: WorkerLoop, kind: str, *values: str) -> None:
    match kind:
        case "fail":
            break_steps(loop, int(values[0]))
        case "slow":
            slow_steps(loop, float(values[0]))
        case "block" | "spin":
            worker.heartbeat.BLOCKED_S, worker.heartbeat.BUSY_S = 0.5, 1.5
            when, method, times = values
            at_call(loop, block if kind == "block" else spin, when, method, int(times))
        case "gloo":
            pass
        case "idle":
            worker.link.IDLE_LINK_S = float(values[0])
        case "fetch":
            worker.fetch.FETCH_TIMEOUT_S = float(values[0])
        case _:
            when, method, times = values
            strike(loop, signal.Signals[f"SIG{kind}"], when, method, int(times))


def strike(loop: WorkerLoop, number: signal.Signals, when: str, method: str, times: int) -> None:
    """Send this process a signal at a point of the protocol, given as for `at_call`."""
    at_call(loop, lambda: os.kill(os.getpid(), number), when, method, times)


def block() -> None:
    """Wait for SIGUSR1, as for a file or a lock that never comes."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(writer)  # any thread may get it
    os.read(reader, 1)
    signal.set_wakeup_fd(-1)


def spin() -> None:
    """Compute until SIGUSR1."""
    woken = False

    def wake(*_: object) -> None:
        nonlocal woken
        woken = True

    signal.signal(signal.SIGUSR1, wake)
    while not woken:
        sum(range(1000))


def at_call(loop: WorkerLoop, strike: Callable[[], None], when: str, method: str, times: int) -> None:
    """Call `strike` before or after the loop's `times`-th call of a method."""
    *parts, name = method.split(".")
    owner = functools.reduce(getattr, parts, loop)
    original = getattr(owner, name)
    left = times

    def struck(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            strike()
        result = original(*arguments)
        if left == 0 and when == "after":
            strike()
        return result

    setattr(owner, name, struck)


def break_steps(loop: WorkerLoop, times: int) -> None:
    """Let the engine's first `times` steps fail."""
    run = loop.engine.run
    left = times

    def failing_run(step: ScheduledStep) -> StepResult:
        nonlocal left
        if left > 0:
            left -= 1
            raise RuntimeError("a fault that the test put in")
        return run(step)

    loop.engine.run = failing_run


def slow_steps(loop: WorkerLoop, seconds: float) -> None:
    """Let every step of the engine take this much longer."""
    run = loop.engine.run

    def slow_run(step: ScheduledStep) -> StepResult:
        time.sleep(seconds)
        return run(step)

    loop.engine.run = slow_run
