"""Makes, watches, kills and ends the Ray actors of slots."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import psutil
import ray
from ray.exceptions import RayError

from deploy.actors import CONCURRENCY, ActorState, WorkerActor
from deploy.placing import Placing
from deploy.ray_cluster import RayCluster
from deploy.resources import thread_environment
from deploy.slots import Slot
from protocol.config import ServeConfig

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
ACTOR_TIMEOUT_S = 2.0
"""The time after which an actor that does not answer is killed, too."""

_Actor = ray.remote(max_restarts=0, max_task_retries=0, **CONCURRENCY)(WorkerActor)
"""The remote class, made once. Its actors have no names unless they need them: Ray then starts them without
waiting for its control store, which may have died.
"""


class Actors:
    """The actors of the supervisor's slots."""

    def __init__(self, config: ServeConfig, cluster: RayCluster, placing: Placing) -> None:
        self._forks = config.forks_workers
        self._cluster = cluster
        self._placing = placing

    def make(self, slot: Slot) -> None:
        environment = thread_environment(slot.config.worker_threads or 1)
        slot.actor = _Actor.options(
            name=None if self._forks else f"{slot.worker_id}-{slot.incarnation}",
            runtime_env={} if self._forks or self._cluster.is_local else {"env_vars": environment},
            **self._placing.hold(slot, slot.gpus),
        ).remote(
            self._cluster.namespace,
            environment,
            not self._cluster.is_local,
            os.getpid() if self._cluster.is_local else 0,
        )
        slot.process, slot.seen, slot.look, slot.num_replaced = None, None, None, 0

    def may_replace(self, slot: Slot) -> bool:
        """Return whether the worker may continue with another actor. If its host has several GPUs, Ray might
        assign that actor another GPU than the worker's.
        """
        return self._forks and self._cluster.is_local and slot.node is not None and slot.node.gpus <= 1

    def kill(self, slot: Slot) -> None:
        """Kill the worker, even if it is stopped and reads no message."""
        answers = slot.ping is None or bool(ray.wait([slot.ping], timeout=0)[0])
        if self._forks and slot.actor is not None and answers:
            with contextlib.suppress(RayError):
                ray.get(slot.actor.kill.remote(), timeout=ACTOR_TIMEOUT_S)
                return
        if slot.node is not None:
            self._placing.distrust(slot.node, time.monotonic())
            log.warning("nothing answers on node %s", slot.node.address)
        self.end(slot)
        if slot.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                slot.process.kill()

    def end(self, slot: Slot) -> None:
        """End the actor's process through Ray. A worker that still runs ends when the next one starts."""
        actor, slot.actor, slot.ended = slot.actor, None, None
        with contextlib.suppress(RayError):
            if actor is not None:
                ray.kill(actor)
        with contextlib.suppress(RayError):
            self._placing.free(slot)

    def end_all(self, slots: Sequence[Slot]) -> None:
        """Let every worker end by itself, then kill the slow ones, which Ray logs as dead workers."""
        running = [slot for slot in slots if slot.ended is not None]
        for slot in running:
            with contextlib.suppress(RayError):
                slot.actor.stop.remote()
        waited = [slot.ended for slot in running]
        ended = ray.wait(waited, num_returns=len(waited), timeout=STOP_GRACE_S)[0] if waited else []
        for slot in running:
            if slot.ended not in ended:
                self.kill(slot)
        for slot in slots:
            self.end(slot)


LOOK_S = 2.0
"""The interval at which the actor of a starting worker is asked for its state."""

ANSWER_S = 10.0
"""An actor that has answered before is stuck if an answer takes longer."""

FIRST_ANSWER_S = 90.0
"""An actor that has never answered is stuck after this long: Ray gives a new process 60 s to begin."""

REMIND_S = 10.0


class StartFault(NamedTuple):
    """The reason why a worker's start is given up. `by_actor`: its actor does not answer."""

    reason: str
    by_actor: bool = False
    is_over: bool = False
    """Whether the start has used up --start-timeout."""


class StartWatch:
    """The watch over starting workers. Calls `on_replaced` for each template that was replaced."""

    def __init__(self, config: ServeConfig, is_local: bool, on_replaced: Callable[[], None]) -> None:
        self._timeout_s = config.start_timeout
        self._is_local = is_local
        self._on_replaced = on_replaced

    def begin(self, slot: Slot, now: float) -> None:
        """Begin to watch the slot's new worker."""
        slot.reminded_at = now
        if slot.seen is not None:
            slot.seen = ActorState(slot.seen.pid)
        self._ask(slot, now)

    def take(self, slot: Slot) -> None:
        """Store the answer of the slot's actor, if it has come."""
        if slot.look is None or not ray.wait([slot.look], timeout=0)[0]:
            return
        answer, slot.look = slot.look, None
        with contextlib.suppress(RayError):  # an ended actor shows in its other calls
            self._note(slot, ray.get(answer))

    def judge(self, slot: Slot, now: float) -> StartFault | None:
        """Return why to give up a worker that is not ready yet, or None. Asks its actor periodically."""
        if now - slot.started > self._timeout_s:
            return StartFault(
                f"it was not ready within {self._timeout_s:g} s (--start-timeout)", is_over=True
            )
        if now - slot.reminded_at > REMIND_S:
            slot.reminded_at = now
            waited_s, what = now - slot.started, self._waits_for(slot, now)
            log.info("worker %s, started %.0f s ago, waits for %s", slot.worker_id, waited_s, what)
        if slot.seen is not None and slot.seen.stuck:
            return StartFault(f"its {slot.seen.stuck}")
        if slot.look is None and now - slot.looked_at > LOOK_S:
            self._ask(slot, now)
        limit_s = FIRST_ANSWER_S if slot.seen is None else ANSWER_S
        if slot.look is not None and now - slot.looked_at > limit_s:
            return StartFault(f"its actor has not answered for {limit_s:g} s", by_actor=True)
        return None

    def _waits_for(self, slot: Slot, now: float) -> str:
        if slot.seen is None:
            return "Ray to start its actor"
        if slot.look is not None and now - slot.looked_at > LOOK_S:
            return f"its actor (process {slot.seen.pid}) to answer"
        return slot.seen.waits_for or "its actor to start it"

    def _ask(self, slot: Slot, now: float) -> None:
        slot.look, slot.looked_at = slot.actor.look.remote(), now

    def _note(self, slot: Slot, seen: ActorState) -> None:
        slot.seen = seen
        if self._is_local and slot.process is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                slot.process = psutil.Process(seen.pid)
        for reason in seen.replaced[slot.num_replaced :]:
            log.error("the template that worker %s waits for is replaced: %s", slot.worker_id, reason)
            self._on_replaced()
        slot.num_replaced = len(seen.replaced)
