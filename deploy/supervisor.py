"""Keeps the workers running: starts one actor for each, tells the router of every death, starts anew."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

import msgspec
import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.actors import CONCURRENCY, WorkerActor
from deploy.launch import forks_workers
from deploy.nodes import Node, choose
from deploy.ray_cluster import RayCluster
from deploy.resources import plan_workers, thread_environment
from deploy.routers.interface import Routers
from deploy.template.client import WorkerExit
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.ids import new_incarnation
from protocol.roles import ROLES, RoleSpec
from worker.launch import Launch

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
STOP_GRACE_S = 5.0
ACTOR_TIMEOUT_S = 2.0
"""An actor that takes longer to answer is ended too."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Failures of a worker that ran this long since are forgotten."""

FRAIL_S = 5.0
"""A process that vanishes this soon after it became ready is taken to have died by itself."""

UNTOLD_S = 10.0
"""Who was let go and is there so long after --drain-timeout was never told: it would have ended itself."""

NODES_INTERVAL_S = 0.5
"""How often Ray is asked which nodes there are."""

DISTRUST_S = 30.0
"""A node that does not answer gets no worker for so long, if that can go elsewhere. By then Ray knows."""

NODES_S = 30.0
"""--min-nodes are waited for no longer, where there is room without them."""

REMIND_S = 10.0

MAX_FAILED_STARTS = 5
"""After so many failures in a row requests no longer wait for a worker. It is still started anew."""


class StartUpError(TandemError):
    """A worker failed before it ever served, or found no node: the configuration, not chance, is to blame."""


@dataclass(eq=False)
class _Slot:
    """A worker's place, through all its incarnations."""

    worker_id: str
    role: RoleSpec
    incarnation: str = ""
    node: Node | None = None
    group: Any = None
    """The placement group that holds the worker's place on its node."""
    actor: Any = None
    ended: Any = None
    pid_ref: Any = None
    ping: Any = None
    """What its actor was asked since the worker fell silent."""
    config: ServeConfig = field(default_factory=ServeConfig)
    """What its node makes of the deployment's."""
    process: psutil.Process | None = None
    started: float = 0.0
    ready_since: float | None = None
    was_ready: bool = False
    failures: int = 0
    """How often in a row it died by itself."""
    start_at: float | None = None
    leaves: bool = False
    """It is drained, and not started anew."""
    changes: bool = False
    """It is drained, to go on in another role."""
    let_go_at: float = 0.0
    """When a router was last told that it may leave or change."""
    dismissed_at: float | None = None
    """When the router had no more use for it: it ends by itself."""

    @property
    def stays_to_decode(self) -> bool:
        return self.role.purpose == "decode" and not self.leaves and not self.changes

    def take_back(self, drain_timeout: float, now: float) -> bool:
        """Whether it stays after all: the router that it was let go for was lost before it told it."""
        stays = (self.leaves or self.changes) and now - self.let_go_at > drain_timeout + UNTOLD_S
        if stays:
            self.leaves = self.changes = False
        return stays

    def note_death(self, vanished: bool, now: float) -> float:
        """Returns the seconds until the next start: 0 unless it dies by itself again and again.

        A ready worker whose process `vanished` was killed by somebody else; one that fails says why.
        """
        lived = now - self.ready_since if self.ready_since is not None else 0.0
        if lived > STABLE_S:
            self.failures = 0
        if not vanished or lived < FRAIL_S:
            self.failures += 1
        self.ready_since = None
        again = self.failures - 1
        return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (again - 1)) if again > 0 else 0.0


def make_slots(config: ServeConfig) -> list[_Slot]:
    """A place for each worker that is deployed."""
    return [
        _Slot(f"{role.name}-{index}", role)
        for role in ROLES.values()
        for index in range(config.num_replicas(role))
    ]


def let_go(slots: Sequence[_Slot], worker_id: str, for_good: bool) -> str:
    """Why a worker can't leave, or change its role; "": it can, which is written down at once."""
    slot = _slot_of(slots, worker_id)
    if not any(other.stays_to_decode for other in slots if other is not slot):
        return "no other decode worker stays"
    if (slot.leaves or slot.changes) and slot.leaves != for_good:
        return "it leaves or changes its role already"
    slot.leaves, slot.changes, slot.let_go_at = for_good, not for_good, time.monotonic()
    return ""


def _slot_of(slots: Sequence[_Slot], worker_id: str) -> _Slot:
    return next(slot for slot in slots if slot.worker_id == worker_id)


class Supervisor:
    """Runs in the launcher's thread until `stop` is set. `on_ready`: every worker has registered."""

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
        self._config = config
        self._forks = forks_workers(config)
        self._nodes: list[Node] = []
        self._nodes_seen = 0.0
        self._distrusted: dict[str, float] = {}
        """When the hosts of these nodes did not answer."""
        self._reminded = 0.0
        self._began = time.monotonic()
        self._stop = stop
        self._on_ready = on_ready
        self._announced = False
        self._slots = make_slots(config)
        router.on_leave(self._let_go, self._renew)

    def run(self) -> None:
        """Keep the workers running until `stop`. Raises `StartUpError`, and `RayDiedError`."""
        try:
            for slot in self._slots:
                slot.start_at = self._began
            self._set_expected()
            self._look_at_nodes(self._began)
            self._start_due(self._began)
            while not self._stop.is_set():
                self._watch()
        finally:
            self._router.expect(())
            if not self._cluster.has_died:
                self._end_all()

    # --- for the router's thread ------------------------------------------------------------------

    def _let_go(self, worker_id: str, for_good: bool) -> str:
        """All routers ask here, one after the other, as none knows what the others are about to do."""
        refusal = let_go(self._slots, worker_id, for_good)
        self._set_expected()
        return refusal

    def _renew(self, worker_id: str, role: str, incarnation: str) -> None:
        """The worker registers anew, in another role."""
        slot = _slot_of(self._slots, worker_id)
        slot.ready_since, slot.started, slot.role = None, time.monotonic(), ROLES[role]
        slot.incarnation, slot.changes = incarnation, False

    # --- one worker -------------------------------------------------------------------------------

    def _start_due(self, now: float) -> None:
        """Start the workers whose time has come and that have a node, or find one."""
        due = [slot for slot in self._slots if slot.start_at is not None and now >= slot.start_at]
        may_place = self._has_nodes(now)
        placed = [
            slot for slot in due if slot.actor is not None or (may_place and self._find_node(slot, now))
        ]
        for slot in placed:
            if slot.was_ready:
                log.info("worker %s is started anew", slot.worker_id)
            self._start(slot)
        waiting = [slot for slot in due if slot not in placed]
        if waiting:
            self._wait_for_nodes(waiting, now)

    def _has_nodes(self, now: float) -> bool:
        """Whether so many have joined as workers are to be spread over."""
        able = sum(node.cores > 0 for node in self._nodes)
        return able >= self._config.min_nodes or now - self._began > NODES_S

    def _find_node(self, slot: _Slot, now: float) -> bool:
        distrusted = {node_id for node_id, since in self._distrusted.items() if now - since < DISTRUST_S}
        held = {
            node.node_id: [other.role.name for other in self._slots_on(node) if other is not slot]
            for node in self._nodes
        }
        slot.node = choose(slot.role.name, self._nodes, held, distrusted)
        return slot.node is not None

    def _slots_on(self, node: Node) -> list[_Slot]:
        return [slot for slot in self._slots if slot.node is not None and slot.node.node_id == node.node_id]

    def _wait_for_nodes(self, slots: Sequence[_Slot], now: float) -> None:
        """Say what is waited for. Raises `StartUpError` when the first start takes too long."""
        names = ", ".join(slot.worker_id for slot in slots)
        spread = "" if self._has_nodes(now) else f" on --min-nodes {self._config.min_nodes}"
        there = ", ".join(map(str, self._nodes)) or "none"
        text = f"there is no room for {names}{spread}; nodes: {there}"
        if not self._announced and now - self._began > self._config.start_timeout:
            raise StartUpError(f"{text} after {self._config.start_timeout:g} s (--start-timeout)")
        if now - self._reminded > REMIND_S:
            self._reminded = now
            log.warning("%s; waiting", text)

    def _place(self, slot: _Slot, gpus: float) -> None:
        """Have Ray make the slot's actor on its node."""
        assert slot.node is not None
        environment = thread_environment(slot.config.worker_threads or 1)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus}
        if not self._cluster.is_local:
            slot.group = self._group(slot, slot.node, gpus)
            options["num_cpus"] = slot.group.bundle_specs[0].get("CPU", 0)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(slot.group, 0)
        actor_class = ray.remote(max_restarts=0, max_task_retries=0, **CONCURRENCY)(WorkerActor)
        slot.actor = actor_class.options(
            name=f"{slot.worker_id}-{slot.incarnation}",
            runtime_env={} if self._forks else {"env_vars": environment},
            **options,
        ).remote(self._cluster.namespace, environment, not self._cluster.is_local)
        slot.process, slot.pid_ref = None, slot.actor.pid.remote()

    def _group(self, slot: _Slot, node: Node, gpus: float) -> Any:
        """Holds a worker's place. A node with roles is for us alone, so they say enough; of another one it
        takes what leaves room for all workers, should no other node be left.
        """
        if slot.role.name in node.roles:
            bundle = {slot.role.name: 1.0}
        else:
            bundle = {"CPU": node.cores * 1000 // self._config.num_workers / 1000}
        if gpus:
            bundle["GPU"] = gpus
        return placement_group(
            [bundle], strategy="STRICT_PACK", bundle_label_selector=[{"ray.io/node-id": node.node_id}]
        )

    def _start(self, slot: _Slot) -> None:
        slot.incarnation = new_incarnation()
        if slot.actor is None:
            assert slot.node is not None
            beside = len(self._slots_on(slot.node))
            slot.config, gpus = plan_workers(self._config, slot.node.gpus, slot.node.cores, beside)
            if not self._cluster.is_local and slot.config.worker_host is None:
                slot.config = msgspec.structs.replace(slot.config, worker_host=slot.node.address)
            self._place(slot, gpus)
        launch = Launch(
            role=slot.role,
            worker_id=slot.worker_id,
            incarnation=slot.incarnation,
            router_endpoints=self._router.worker_endpoints,
            config=slot.config,
            keys=self._keys,
            shares_cores=self._config.worker_threads is None and slot.config.device == "cpu",
        )
        slot.ended = slot.actor.run.remote(msgspec.msgpack.encode(launch))
        slot.started = time.monotonic()
        slot.ready_since, slot.start_at, slot.dismissed_at, slot.changes = None, None, None, False
        slot.ping = None

    def _watch(self) -> None:
        self._cluster.check()
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
        self._start_due(now)
        if not self._announced and all(slot.was_ready for slot in self._slots):
            self._announced = True
            self._on_ready()

    def _look_at_nodes(self, now: float) -> None:
        """Take note of nodes that came, and of workers whose node has gone."""
        if now - self._nodes_seen < NODES_INTERVAL_S:
            return
        self._nodes, self._nodes_seen = self._cluster.nodes(), now
        for slot in [slot for slot in self._slots if self._has_lost_node(slot)]:
            assert slot.node is not None
            reason = f"its node {slot.node.address} is gone"
            self._end_actor(slot)
            self._on_ended(slot, reason, vanished=True, by_node=True)

    def _has_lost_node(self, slot: _Slot) -> bool:
        return slot.node is not None and all(node.node_id != slot.node.node_id for node in self._nodes)

    def _look_at(self, slot: _Slot, now: float) -> None:
        """Take note of a worker that became ready, and end one that is silent or never becomes ready."""
        if self._cluster.is_local and slot.process is None and ray.wait([slot.pid_ref], timeout=0)[0]:
            with contextlib.suppress(RayError, psutil.NoSuchProcess):
                slot.process = psutil.Process(ray.get(slot.pid_ref))
        silence_s = self._router.silence_of(slot.worker_id, slot.incarnation)
        if silence_s is not None:
            slot.dismissed_at = None
            if slot.ready_since is None:
                slot.ready_since, slot.was_ready = now, True
                self._set_expected()
            if slot.take_back(self._config.drain_timeout, now):
                log.warning("worker %s stays: no router has told it to leave", slot.worker_id)
                self._set_expected()
            self._judge_silence(slot, silence_s)
        elif slot.ready_since is not None:
            slot.dismissed_at = slot.dismissed_at or now
            if now - slot.dismissed_at > STOP_GRACE_S:
                self._kill(slot)
                self._on_ended(slot, "it did not end when it was drained")
        elif now - slot.started > self._config.start_timeout:
            reason = f"it was not ready within {self._config.start_timeout:g} s (--start-timeout)"
            self._kill(slot)
            self._on_ended(slot, reason)

    def _judge_silence(self, slot: _Slot, silence_s: float) -> None:
        """Ask a silent worker's actor whether anything answers there, then end the worker."""
        if silence_s <= self._config.worker_timeout:
            slot.ping = None
            return
        if slot.ping is None:
            slot.ping = slot.actor.pid.remote()
        if silence_s > 2 * self._config.worker_timeout:
            self._kill(slot)
            self._on_ended(slot, f"nothing was heard of it for {silence_s:.1f} s")

    def _on_exit(self, slot: _Slot, ref: Any) -> None:
        """A worker's process has ended, or its actor's and the worker's with it."""
        by_node = False
        try:
            end: WorkerExit = ray.get(ref)
        except RayError as error:
            end = WorkerExit(f"its process died, killed or out of memory ({type(error).__name__})", SIGKILL)
            self._nodes = self._cluster.nodes()
            by_node = self._has_lost_node(slot)
            self._end_actor(slot)
        if not self._forks:
            self._end_actor(slot)
        self._on_ended(slot, end.reason or "it ended", vanished=end.was_killed, by_node=by_node)

    def _on_ended(self, slot: _Slot, reason: str, vanished: bool = False, by_node: bool = False) -> None:
        self._router.mark_dead(slot.worker_id, slot.incarnation, reason)
        slot.ended = None
        if self._stop.is_set():
            return
        if slot.leaves:
            self._end_actor(slot)
            self._slots.remove(slot)
            log.info("worker %s has left", slot.worker_id)
            return
        if not slot.was_ready and not by_node:
            raise StartUpError(f"worker {slot.worker_id} cannot start: {reason}")
        now = time.monotonic()
        delay = slot.note_death(vanished, now)
        slot.start_at = now + delay
        self._set_expected()
        log.error("worker %s ended: %s; it is started anew in %.1f s", slot.worker_id, reason, delay)

    def _set_expected(self) -> None:
        """Tell the router whom requests may wait for."""
        kept = [slot for slot in self._slots if not slot.leaves and not slot.role.holds_draft]
        hopeful = (slot for slot in kept if slot.failures < MAX_FAILED_STARTS or slot.ready_since)
        self._router.expect([slot.worker_id for slot in hopeful])

    def _kill(self, slot: _Slot) -> None:
        """End the worker for certain, also one that is stopped and takes no message."""
        answers = slot.ping is None or bool(ray.wait([slot.ping], timeout=0)[0])
        if self._forks and slot.actor is not None and answers:
            with contextlib.suppress(RayError):
                ray.get(slot.actor.kill.remote(), timeout=ACTOR_TIMEOUT_S)
                return
        if slot.node is not None:
            self._distrusted[slot.node.node_id] = time.monotonic()
            log.warning("nothing answers on node %s", slot.node.address)
        self._end_actor(slot)
        if slot.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                slot.process.kill()

    def _end_actor(self, slot: _Slot) -> None:
        """Ray has the actor's process exit, and the worker goes with it."""
        with contextlib.suppress(RayError):
            if slot.actor is not None:
                ray.kill(slot.actor)
            if slot.group is not None:
                remove_placement_group(slot.group)
        slot.actor = slot.ended = slot.group = slot.node = None

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
            if slot.ended not in ended:
                self._kill(slot)
        for slot in self._slots:
            self._end_actor(slot)
