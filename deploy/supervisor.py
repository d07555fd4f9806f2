"""Keeps the workers running: starts one actor for each, tells the router of every death, starts anew."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import ray
from ray.exceptions import RayError

from deploy.actors import CONCURRENCY, Launch, WorkerActor
from deploy.launcher import RouterView
from deploy.resources import available_cores, plan_workers, thread_environment
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.ids import new_incarnation
from protocol.messages import Role
from protocol.sockets import ClusterKeys

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
STOP_GRACE_S = 5.0
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
"""A worker that ran this long starts its next restart without backoff."""


class StartUpError(TandemError):
    """A worker failed before it ever served: the configuration, not chance, is to blame."""


@dataclass(eq=False)
class _Slot:
    """A worker's place, through all its incarnations."""

    worker_id: str
    role: Role
    incarnation: str = ""
    actor: Any = None
    ended: Any = None
    pid_ref: Any = None
    process: psutil.Process | None = None
    started: float = 0.0
    silent_since: float | None = None
    ready: bool = False
    was_ready: bool = False
    failures: int = 0
    start_at: float | None = None


class Supervisor:
    """Runs in the launcher's thread until `stop` is set. `on_ready`: every worker has registered."""

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        router: RouterView,
        *,
        num_gpus: float,
        is_local: bool,
        stop: threading.Event,
        on_ready: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._router = router
        self._cores = available_cores()
        self._config, self._gpus = plan_workers(config, num_gpus, self._cores)
        self._is_local = is_local
        self._stop = stop
        self._on_ready = on_ready
        self._announced = False
        prefills = config.prefill_replicas if self._config.disaggregation else 0
        self._slots = [_Slot(f"prefill-{index}", "prefill") for index in range(prefills)]
        self._slots += [_Slot(f"decode-{index}", "decode") for index in range(config.decode_replicas)]

    def run(self) -> None:
        """Keep the workers running until `stop`. Raises `StartUpError`."""
        try:
            for slot in self._slots:
                self._start(slot)
            while not self._stop.is_set():
                self._watch()
        finally:
            self._end_all()

    # --- one worker -------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, **CONCURRENCY)(WorkerActor)
        threads = self._config.worker_threads or 1
        environment = thread_environment(threads)
        slot.incarnation = new_incarnation()
        slot.actor = actor_class.options(
            name=f"{slot.worker_id}-{slot.incarnation}",
            num_cpus=0 if self._is_local else threads,
            num_gpus=self._gpus,
            scheduling_strategy="DEFAULT" if self._is_local else "SPREAD",
            runtime_env={"env_vars": environment},
        ).remote()
        slot.process, slot.pid_ref = None, slot.actor.pid.remote()
        launch = Launch(
            role=slot.role,
            worker_id=slot.worker_id,
            incarnation=slot.incarnation,
            router_endpoint=self._router.endpoint,
            config=self._config,
            keys=self._keys,
        )
        slot.ended = slot.actor.run.remote(msgspec.msgpack.encode(launch))
        slot.started = time.monotonic()
        slot.ready, slot.silent_since, slot.start_at = False, None, None

    def _watch(self) -> None:
        by_ref = {slot.ended: slot for slot in self._slots if slot.ended is not None}
        if by_ref:
            ended, _ = ray.wait(list(by_ref), timeout=WATCH_INTERVAL_S)
        else:
            ended = []
            self._stop.wait(WATCH_INTERVAL_S)
        for ref in ended:
            self._on_ended(by_ref[ref], _reason(ref))
        now = time.monotonic()
        for slot in self._slots:
            if slot.ended is not None:
                self._look_at(slot, now)
            elif slot.start_at is not None and now >= slot.start_at:
                log.info("worker %s is started anew", slot.worker_id)
                self._start(slot)
        if not self._announced and all(slot.was_ready for slot in self._slots):
            self._announced = True
            self._on_ready()

    def _look_at(self, slot: _Slot, now: float) -> None:
        """Take note of a worker that became ready, and end one that is silent or never becomes ready."""
        if self._is_local and slot.process is None and ray.wait([slot.pid_ref], timeout=0)[0]:
            with contextlib.suppress(RayError, psutil.NoSuchProcess):
                slot.process = psutil.Process(ray.get(slot.pid_ref))
        live = self._router.is_live(slot.worker_id, slot.incarnation)
        if live:
            slot.ready = slot.was_ready = True
            slot.silent_since = None
        elif slot.ready:
            slot.silent_since = slot.silent_since or now
            if now - slot.silent_since > self._config.worker_timeout:
                self._on_ended(slot, "it is silent")
        elif now - slot.started > self._config.start_timeout:
            reason = f"it was not ready within {self._config.start_timeout:g} s (--start-timeout)"
            self._on_ended(slot, reason)

    def _on_ended(self, slot: _Slot, reason: str) -> None:
        self._router.mark_dead(slot.worker_id, slot.incarnation, reason)
        self._kill(slot)
        if self._stop.is_set():
            return
        if not slot.was_ready:
            raise StartUpError(f"worker {slot.worker_id} cannot start: {reason}")
        now = time.monotonic()
        slot.failures = 1 if slot.ready and now - slot.started > STABLE_S else slot.failures + 1
        delay = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (slot.failures - 1))
        slot.start_at = now + delay
        log.error("worker %s ended: %s; it is started anew in %.1f s", slot.worker_id, reason, delay)

    def _kill(self, slot: _Slot) -> None:
        """End the process for certain, also one that is stopped and takes no message."""
        self._end(slot)
        if slot.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                slot.process.kill()

    def _end(self, slot: _Slot) -> None:
        """Ray has its process exit."""
        if slot.actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(slot.actor)
        slot.actor = slot.ended = None

    # --- the end ----------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Let every worker end by itself; kill those that take too long, and no other.

        Ray reports a process that is killed as a worker that died.
        """
        running = [slot for slot in self._slots if slot.ended is not None]
        for slot in running:
            with contextlib.suppress(RayError):
                slot.actor.stop.remote()
        waited = [slot.ended for slot in running]
        ended = ray.wait(waited, num_returns=len(waited), timeout=STOP_GRACE_S)[0] if waited else []
        for slot in running:
            if slot.ended in ended:
                self._end(slot)
            else:
                self._kill(slot)


def _reason(ref: Any) -> str:
    """Why a worker's `run` returned."""
    try:
        return ray.get(ref) or "it ended"
    except RayError as error:
        return f"its process died, killed or out of memory ({type(error).__name__})"
