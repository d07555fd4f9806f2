"""The Ray actor that starts and watches one worker on a host."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import ray

from deploy.processes import ProcessWatch
from deploy.template.client import TemplateClient, TemplateError, WorkerExit, WorkerProcess
from protocol.errors import ConfigError
from worker.launch import Launch, StopHandle, read_launch

if TYPE_CHECKING:
    from deploy.ray_carrier import RayCarrier

OBJECTS = "objects"
CONCURRENCY = {"max_concurrency": 4, "concurrency_groups": {OBJECTS: 1}}
"""The actor's threads: four shared by `run`, `stop`, `kill` and `look`, and one for `deliver`."""

PATIENCE_SHARE = 0.9
"""The share of --start-timeout that a template gets. A second template reports the fault in the rest."""


@dataclass(frozen=True)
class ActorState:
    """An actor's state: its process id, what the start of its worker `waits_for`, why the worker is `stuck`
    (if it is stopped), why templates were `replaced` since the actor began, and whether the worker
    `is_stopped` now.
    """

    pid: int
    waits_for: str = ""
    stuck: str = ""
    replaced: tuple[str, ...] = ()
    is_stopped: bool = False


class WorkerActor:
    """An actor that runs one worker at a time. `run` occupies one of the actor's threads for the worker's
    whole life.

    Ray places and watches the actor, which does not import torch. The worker is a separate process. The actor
    outlives it, so `run` may be called again. On the launcher's host a worker also outlives its actor:
    another actor takes it over with `adopt`. With the `object_store` transport the worker runs in the actor's
    process, and peers also call `deliver`; otherwise neither tokens nor blocks pass through these methods.
    """

    def __init__(
        self, template: str, environment: dict[str, str], own_stderr: bool, launcher_pid: int
    ) -> None:
        """Take the arguments of `TemplateClient`."""
        self._template = TemplateClient(
            template, environment, own_stderr=own_stderr, launcher_pid=launcher_pid
        )
        self._environment = environment
        self._worker: WorkerProcess | None = None
        self._watch: ProcessWatch | None = None
        """The watch of the worker's process; None when it has ended."""
        self._running = threading.Lock()
        """The lock held while a worker runs: the next one starts only after this actor has seen it end."""
        self._stop = StopHandle()
        self._carrier: RayCarrier | None = None

    def look(self) -> ActorState:
        """Return the actor's state. Call it about every two seconds while the worker starts or is silent."""
        watch, waits_for = self._watch, self._template.waits_for
        if watch is not None:
            watch.look()
            waits_for = f"process {watch.pid} ({watch.state}) to get its model ready"
        stuck = watch.stopped if watch is not None else ""
        is_stopped = watch is not None and watch.is_stopped
        return ActorState(os.getpid(), waits_for, stuck, tuple(self._template.replaced), is_stopped)

    def run(self, encoded: bytes) -> WorkerExit:
        """Run the worker of the encoded `Launch`. Returns how it ended."""
        try:
            launch = read_launch(encoded)
        except ConfigError as error:
            return WorkerExit(str(error))
        if not launch.config.forks_workers:
            return self._run_here(launch)
        return self._keep(partial(self._template.spawn, encoded), launch.config.start_timeout)

    def adopt(self, worker_id: str, start_timeout: float) -> WorkerExit:
        """Take over a running worker whose actor has ended. Returns how the worker ended."""
        return self._keep(partial(self._template.adopt, worker_id), start_timeout)

    def _keep(self, obtain: Callable[[float], WorkerProcess], start_timeout: float) -> WorkerExit:
        """Watch a worker until it has ended. `obtain` starts or adopts it within the given seconds."""
        with self._running:
            try:
                worker = self._worker = obtain(PATIENCE_SHARE * start_timeout)
            except TemplateError as error:
                return WorkerExit(str(error))
            with contextlib.suppress(psutil.NoSuchProcess):
                self._watch = ProcessWatch(worker.pid)
            if self._stop.requested:
                worker.stop()
            try:
                return worker.wait()
            finally:
                self._watch = None

    def stop(self) -> None:
        """Ask the worker to end. A worker that starts later ends at once."""
        self._stop.stop()
        if self._worker is not None:
            self._worker.stop()

    def kill(self) -> None:
        """Kill the worker, even if it is stopped and reads no message."""
        if self._worker is not None:
            self._worker.kill()

    @ray.method(concurrency_group=OBJECTS)
    def deliver(self, inbox_id: str, number: int, references: list[Any]) -> None:
        """Receive a peer's object reference. It is in a list, since Ray would resolve a bare reference."""
        if self._carrier is not None:
            self._carrier.inboxes.put(inbox_id, number, references[0])

    def _run_here(self, launch: Launch) -> WorkerExit:
        from deploy.ray_carrier import RayCarrier

        os.environ.update(self._environment)  # torch is not imported yet
        if "object_store" in launch.config.transport_names:
            self._carrier = RayCarrier()
        try:
            from worker.process import run_launch
        except Exception as error:  # a broken installation, as of torch
            return WorkerExit(f"{type(error).__name__}: {error}".splitlines()[0])
        return WorkerExit(run_launch(launch, self._stop, self._carrier))
