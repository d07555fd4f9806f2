"""Makes, kills and ends the Ray actors of slots."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence

import psutil
import ray
from ray.exceptions import RayError

from deploy.actors import CONCURRENCY, WorkerActor
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
