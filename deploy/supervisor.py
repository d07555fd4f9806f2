"""Keeps the workers running: starts an actor for each, restarts it, and tells the router of deaths."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from signal import SIGKILL
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from deploy.ray_cluster import RayCluster
from deploy.resources import plan_workers
from deploy.routers.pool import Routers
from deploy.slot_actors import REMIND_S, STOP_GRACE_S, Actors, Placing, StartFault, StartWatch
from deploy.slots import Slot, let_go, make_slots, rescale, room, slot_of, wanted_bundles
from deploy.template.client import WorkerExit
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.ids import new_incarnation
from protocol.roles import ROLES
from router.scaling.interface import ScaleAnswer, ScaleRequest
from worker.launch import Launch

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
MAX_FAILED_STARTS = 5
"""Failed starts in a row after which requests no longer wait for a worker. It is still restarted."""


class StartUpError(TandemError):
    """A worker failed before it ever served, or found no node, so the configuration is at fault."""


class Supervisor:
    """Starts workers and replaces lost ones until `stop` is set. Calls `on_ready` once all are registered."""

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        router: Routers,
        cluster: RayCluster,
        stop: threading.Event,
        on_ready: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._router = router
        self._cluster = cluster
        self._config = replace(config, api_key=None)
        """The workers' configuration, without API keys since Ray transports it."""
        # Ranks wait for each other at every product, so they must not lend cores.
        self._shares_cores = config.worker_threads is None and not config.has_ranks
        self._reminded = 0.0
        self._began = time.monotonic()
        self._stop = stop
        self._on_ready = on_ready
        self._announced = False
        self._slots = make_slots(config)
        self._placing = Placing(config, cluster, self._slots)
        self._actors = Actors(config, cluster, self._placing)
        self._starts = StartWatch(config, cluster.is_local, lambda: router.replaced("template"))
        self._no_room_until: dict[str, float] = {}
        """The time until which a role has no room for more workers, after one of its workers was given up."""
        self._expected: tuple[Mapping[str, str], Mapping[str, int]] | None = None
        router.on_leave(self._let_go, self._renew)
        router.on_scale(self._scale)

    def run(self) -> None:
        """Keep the workers running until `stop`. Raises `StartUpError`, and `RayStartError`."""
        try:
            for slot in self._slots:
                slot.start_at = self._began
            self._set_expected()
            self._look_at_nodes(self._began)
            self._start_due(self._began)
            while not self._stop.is_set():
                self._watch()
        finally:
            self._router.expect({}, {})
            if not self._cluster.has_died:
                self._cluster.ask_for([])
                self._actors.end_all(self._slots)

    # --- for the routers' thread ------------------------------------------------------------------

    def _let_go(self, worker_id: str, for_good: bool) -> str:
        """Decide for all routers, one at a time, whether a worker may leave or change its role."""
        refusal = let_go(self._slots, worker_id, for_good)
        self._set_expected()
        return refusal

    def _scale(self, request: ScaleRequest) -> ScaleAnswer:
        """Change the number of workers for a router. They start and end in the supervisor's next turn."""
        if not self._announced:
            return ScaleAnswer(refusal="the server is starting", field=min(request.targets))
        answer = rescale(self._slots, request, self._config, self._placing.nodes, self._cluster.may_grow)
        if not answer.refusal:
            wanted = ", ".join(f"{count} {role}" for role, count in request.targets.items())
            started, leaving = (" ".join(each) or "none" for each in (answer.started, answer.leaving))
            log.info("asked for workers: %s; starting: %s; leaving: %s", wanted, started, leaving)
        self._set_expected()
        return answer

    def _renew(self, worker_id: str, role: str, incarnation: str) -> None:
        """Note that a worker registers again, in another role."""
        slot = slot_of(self._slots, worker_id)
        if slot is None:
            return  # the worker was given up meanwhile
        slot.ready_since, slot.started, slot.role = None, time.monotonic(), ROLES[role]
        slot.incarnation, slot.changes = incarnation, False

    # --- for its own thread -----------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        """Start the workers that are due and have a node. Look for nodes for the others."""
        due = [slot for slot in self._slots if slot.start_at is not None and now >= slot.start_at]
        placed = [slot for slot in due if slot.actor is not None or self._placing.find(slot, now)]
        for slot in placed:
            if slot.was_ready:
                log.info("worker %s is restarted", slot.worker_id)
            self._start(slot)
        waiting = [slot for slot in due if slot not in placed]
        if waiting:
            self._wait_for_nodes(waiting, now)

    def _wait_for_nodes(self, slots: Sequence[Slot], now: float) -> None:
        """Log what these slots wait for. Raises `StartUpError` when the first start takes too long."""
        for slot in [slot for slot in slots if self._waits_too_long(slot, now)]:
            limit = f"{self._config.scale_timeout:g} s (--scale-timeout)"
            self._give_up(slot, f"{self._placing.shortage([slot], now)} after {limit}")
        waiting = [slot for slot in slots if slot in self._slots]
        if not waiting:
            return
        text = self._placing.shortage(waiting, now)
        if not self._announced and now - self._began > self._config.start_timeout:
            raise StartUpError(f"{text} after {self._config.start_timeout:g} s (--start-timeout)")
        if now - self._reminded > REMIND_S:
            self._reminded = now
            log.warning("%s; waiting", text)

    def _waits_too_long(self, slot: Slot, now: float) -> bool:
        waits_since = None if slot.was_ready else slot.added_at
        return waits_since is not None and now - waits_since > self._config.scale_timeout

    def _give_up(self, slot: Slot, reason: str) -> None:
        """Remove an added worker that cannot be started. All other workers continue."""
        log.error("worker %s is given up: %s", slot.worker_id, reason)
        self._no_room_until[slot.role.name] = time.monotonic() + self._config.scale_timeout
        self._forget(slot)
        self._router.gave_up(slot.worker_id, reason)

    def _forget(self, slot: Slot) -> None:
        self._actors.end(slot)
        self._slots.remove(slot)
        self._set_expected()

    def _start(self, slot: Slot) -> None:
        slot.incarnation = new_incarnation()
        if slot.actor is None:
            assert slot.node is not None
            beside, ranks = len(self._placing.on(slot.node)), self._placing.ranks_on(slot.node)
            slot.config, gpus = plan_workers(self._config, slot.node.gpus, slot.node.cores, beside, ranks)
            slot.gpus = gpus * self._config.num_ranks(slot.role)
            if not self._cluster.is_local and slot.config.worker_host is None:
                slot.config = replace(slot.config, worker_host=slot.node.address)
            self._actors.make(slot)
        launch = Launch(
            role=slot.role,
            worker_id=slot.worker_id,
            incarnation=slot.incarnation,
            router_endpoints=self._router.worker_endpoints,
            config=slot.config,
            keys=self._keys,
            shares_cores=self._shares_cores and slot.config.device == "cpu",
        )
        slot.ended = slot.actor.run.remote(msgspec.msgpack.encode(launch))
        slot.started = time.monotonic()
        slot.ready_since, slot.start_at, slot.dismissed_at, slot.changes = None, None, None, False
        slot.ping = None
        self._starts.begin(slot, slot.started)

    def _adopt(self, slot: Slot, reason: str) -> None:
        """Give a serving worker another actor. Restart workers that don't serve or can't outlive actors."""
        self._router.replaced("actor")
        slot.actor = slot.ended = None
        if slot.ready_since is None or not self._actors.may_replace(slot):
            self._actors.end(slot)
            self._on_ended(slot, reason, vanished=True, by_host=True)
            return
        log.error("worker %s continues with another actor: %s", slot.worker_id, reason)
        self._actors.make(slot)
        slot.ended = slot.actor.adopt.remote(slot.worker_id, self._config.start_timeout)
        self._starts.begin(slot, time.monotonic())

    def _restart_ray(self, reason: str) -> None:
        """Start another Ray. Meanwhile workers and routers continue without it."""
        log.error("%s; Ray is started again", reason)
        self._router.replaced("ray")
        running = [slot for slot in self._slots if slot.ended is not None]
        for slot in self._slots:
            slot.actor = slot.ended = slot.ping = slot.look = None
        self._cluster.restart(self._stop)
        self._router.restore_signals()
        for slot in running:
            self._adopt(slot, reason)

    def _watch(self) -> None:
        if reason := self._cluster.death():
            self._restart_ray(reason)
        by_ref = {slot.ended: slot for slot in self._slots if slot.ended is not None}
        if by_ref:
            ended, _ = ray.wait(list(by_ref), timeout=WATCH_INTERVAL_S)
        else:
            ended = []
            self._stop.wait(WATCH_INTERVAL_S)
        for ref in ended:
            self._on_exit(by_ref[ref], ref)
        now = time.monotonic()
        self._look_at_nodes(now)
        for slot in list(self._slots):
            if slot.ended is not None:
                self._look_at(slot, now)
        self._end_unready()
        self._start_due(now)
        self._set_expected()
        self._cluster.ask_for(wanted_bundles(self._slots, self._placing.nodes))
        if not self._announced and all(slot.was_ready for slot in self._slots):
            self._announced = True
            self._on_ready()

    def _look_at_nodes(self, now: float) -> None:
        """Note new nodes, and workers whose node has gone."""
        self._placing.look(now)
        for slot in [slot for slot in self._slots if self._placing.has_lost(slot)]:
            assert slot.node is not None
            reason = f"its node {slot.node.address} is gone"
            self._actors.end(slot)
            self._on_ended(slot, reason, vanished=True, by_host=True)

    def _look_at(self, slot: Slot, now: float) -> None:
        """Note that a worker became ready. End a worker that is silent, or not ready in time."""
        self._starts.take(slot)
        silence_s = self._router.silence_of(slot.worker_id, slot.incarnation)
        if silence_s is not None:
            slot.dismissed_at = None
            # `_end_unready` ends a worker that is no longer wanted; no router needs to drain it.
            if slot.ready_since is None and not slot.leaves:
                slot.ready_since, slot.was_ready = now, True
                self._set_expected()
            if slot.take_back(self._config.drain_timeout, now):
                log.warning("worker %s stays: no router has told it to leave", slot.worker_id)
                self._set_expected()
            self._judge_silence(slot, silence_s)
        elif slot.ready_since is not None:
            slot.dismissed_at = slot.dismissed_at or now
            if now - slot.dismissed_at > STOP_GRACE_S:
                self._actors.kill(slot)
                self._on_ended(slot, "it did not end when it was drained")
        elif (fault := self._starts.judge(slot, now)) is not None:
            self._end_start(slot, fault, now)

    def _end_start(self, slot: Slot, fault: StartFault, now: float) -> None:
        """End a worker that does not become ready, and its actor if that may still be waiting."""
        if fault.by_actor:
            self._router.replaced("actor")
            slot.ping = slot.look
        self._actors.kill(slot)
        if fault.is_over:
            self._actors.end(slot)
        waited_s = now - (self._began if slot.added_at is None else slot.added_at)
        by_host = not fault.is_over and waited_s < self._config.start_timeout
        self._on_ended(slot, fault.reason, by_host=by_host)

    def _judge_silence(self, slot: Slot, silence_s: float) -> None:
        """Ask a silent worker's actor whether its host answers, and later end the worker."""
        if silence_s <= self._config.worker_timeout:
            slot.ping = None
            return
        if slot.ping is None:
            slot.ping = slot.actor.look.remote()
        if silence_s > 2 * self._config.worker_timeout:
            was_stopped = self._actors.was_stopped(slot)
            self._actors.kill(slot)
            self._on_ended(slot, f"it sent nothing for {silence_s:.1f} s", vanished=was_stopped)

    def _on_exit(self, slot: Slot, ref: Any) -> None:
        """Handle the end of a worker's process, or of its actor's process."""
        by_host = False
        try:
            end: WorkerExit = ray.get(ref)
        except RayError as error:
            end = WorkerExit(f"its process died, killed or out of memory ({type(error).__name__})", SIGKILL)
            if self._actors.may_replace(slot) and slot.seen is not None:
                self._adopt(slot, f"its actor died ({type(error).__name__})")
                return
            self._placing.look_at_once(time.monotonic())
            by_host = self._placing.has_lost(slot)
            self._actors.end(slot)
        if not self._config.forks_workers:
            self._actors.end(slot)
        self._on_ended(slot, end.reason or "it ended", vanished=end.was_killed, by_host=by_host)

    def _on_ended(self, slot: Slot, reason: str, vanished: bool = False, by_host: bool = False) -> None:
        """Restart or forget an ended worker. `vanished`: it was killed or stopped from outside. `by_host`:
        its host is at fault.
        """
        self._router.mark_dead(slot.worker_id, slot.incarnation, reason)
        slot.ended = None
        if self._stop.is_set():
            return
        if slot.leaves:
            self._forget(slot)
            log.info("worker %s has left", slot.worker_id)
            return
        may_start = slot.was_ready or by_host or (vanished and slot.failed_starts == 0)
        if not may_start and slot.added_at is not None:
            self._give_up(slot, f"it cannot start: {reason}")
            return
        if not may_start:
            raise StartUpError(f"worker {slot.worker_id} cannot start: {reason}")
        now = time.monotonic()
        if slot.changes and not vanished:
            slot.ready_since, slot.start_at = None, now
            log.info("worker %s was drained for a restart", slot.worker_id)
            return
        delay = slot.note_death(vanished, now)
        slot.start_at = now + delay
        self._router.replaced("worker")
        self._set_expected()
        log.error("worker %s ended: %s; it is restarted in %.1f s", slot.worker_id, reason, delay)

    def _end_unready(self) -> None:
        """End leaving workers that do not serve yet, so they have nothing to drain."""
        for slot in [slot for slot in self._slots if slot.leaves and slot.ready_since is None]:
            if slot.ended is not None:
                self._actors.kill(slot)
            self._router.mark_dead(slot.worker_id, slot.incarnation, "it is not wanted any more")
            self._router.gave_up(slot.worker_id, "it is not wanted any more")
            self._forget(slot)

    def _set_expected(self) -> None:
        """Tell the routers which workers requests may wait for, and how many more would fit."""
        kept = [slot for slot in self._slots if not slot.leaves]
        hopeful = (slot for slot in kept if slot.failed_starts < MAX_FAILED_STARTS or slot.ready_since)
        roles = {slot.worker_id: slot.role.name for slot in hopeful}
        found = room(self._slots, self._config, self._placing.nodes, self._cluster.may_grow)
        now = time.monotonic()
        for role in [role for role, until in self._no_room_until.items() if now < until]:
            found[role] = 0
        expected = roles, found
        if expected != self._expected:
            self._expected = expected
            self._router.expect(*expected)
