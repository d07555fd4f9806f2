"""Places slots on nodes; makes, watches, kills and ends their Ray actors."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.actors import CONCURRENCY, ActorState, WorkerActor
from deploy.ray_cluster import RayCluster
from deploy.resources import thread_environment
from deploy.slots import Node, Slot, choose, most_on
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

    def was_stopped(self, slot: Slot) -> bool:
        """Return whether the silent worker's actor, if it has answered, found the worker stopped."""
        with contextlib.suppress(RayError):
            if slot.ping is not None and ray.wait([slot.ping], timeout=0)[0]:
                state: ActorState = ray.get(slot.ping)
                return state.is_stopped
        return False

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
            late = f"it was not ready within {self._timeout_s:g} s (--start-timeout)"
            return StartFault(late, is_over=True)
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


NODES_INTERVAL_S = 0.5
"""The interval at which Ray is asked for its nodes."""

DISTRUST_S = 30.0
"""A node that does not answer gets no workers for this long. By then Ray knows its state."""

NODES_S = 30.0
"""The longest wait for --min-nodes. Afterwards workers start on fewer nodes that have room."""

SET_UP_S = 600.0
"""The longest wait for --min-nodes while Ray sets hosts up, which includes installing packages."""


class Placing:
    """The choice of a node for each of the supervisor's `slots`. Only one thread may use it."""

    def __init__(self, config: ServeConfig, cluster: RayCluster, slots: Sequence[Slot]) -> None:
        self._config = config
        self._cluster = cluster
        self._slots = slots
        self._began = time.monotonic()
        self.nodes: list[Node] = []
        self._nodes_seen = 0.0
        self._distrusted: dict[str, float] = {}
        """The time when each distrusted node's host last failed to answer, by node id."""

    def look(self, now: float) -> None:
        """Ask Ray for its nodes, unless the last answer is recent."""
        if now - self._nodes_seen >= NODES_INTERVAL_S:
            self.look_at_once(now)

    def look_at_once(self, now: float) -> None:
        self.nodes, self._nodes_seen = self._cluster.nodes(), now

    def has_lost(self, slot: Slot) -> bool:
        """Return whether the slot's node is gone."""
        return slot.node is not None and all(node.node_id != slot.node.node_id for node in self.nodes)

    def distrust(self, node: Node, now: float) -> None:
        """Note that the node's host does not answer."""
        self._distrusted[node.node_id] = now

    def find(self, slot: Slot, now: float) -> bool:
        """Give the slot its best node. Returns False if no node has room, or nodes have yet to join."""
        if not self._has_nodes(now):
            return False
        distrusted = {node_id for node_id, since in self._distrusted.items() if now - since < DISTRUST_S}
        others = {node.node_id: [each for each in self.on(node) if each is not slot] for node in self.nodes}
        held = {node_id: [each.place for each in on] for node_id, on in others.items()}
        ranks = self._config.num_ranks(slot.role)
        gpu_nodes = [node for node in self.nodes if node.gpus] or self.nodes
        nodes = [node for node in gpu_nodes if self._has_gpus(node, slot)]
        slot.node = choose(slot.role.name, nodes, held, distrusted, ranks)
        slot.placed_as = slot.role.name if slot.node is not None else None
        return slot.node is not None

    def _has_gpus(self, node: Node, slot: Slot) -> bool:
        """Return whether a node has a free GPU for each rank of the slot's worker. Always true for nodes
        without GPUs, and without ranks, since workers then share GPUs.
        """
        config = self._config
        if not node.gpus or config.device == "cpu" or not config.has_ranks:
            return True
        taken = sum(config.num_ranks(other.role) for other in self.on(node) if other is not slot)
        return node.gpus - taken >= config.num_ranks(slot.role)

    def on(self, node: Node) -> list[Slot]:
        return [slot for slot in self._slots if slot.node is not None and slot.node.node_id == node.node_id]

    def ranks_on(self, node: Node) -> int:
        """Return the number of processes of all workers on the node."""
        return sum(self._config.num_ranks(slot.role) for slot in self.on(node))

    def shortage(self, waiting: Sequence[Slot], now: float) -> str:
        """Describe what these slots wait for."""
        names = ", ".join(slot.worker_id for slot in waiting)
        spread = "" if self._has_nodes(now) else f" on --min-nodes {self._config.min_nodes}"
        there = ", ".join(map(str, self.nodes)) or "none"
        return f"there is no room for {names}{spread}; nodes: {there}"

    def hold(self, slot: Slot, gpus: float) -> dict[str, Any]:
        """Reserve a place on the slot's node in Ray. Returns the options of an actor that uses it."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus}
        if not self._cluster.is_local:
            assert slot.node is not None
            slot.group = self._group(slot, slot.node, gpus)
            options["num_cpus"] = slot.group.bundle_specs[0].get("CPU", 0)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(slot.group, 0)
        return options

    def free(self, slot: Slot) -> None:
        """Release the place of the slot's worker. Raises `RayError`."""
        group, slot.group, slot.node, slot.placed_as = slot.group, None, None, None
        if group is not None:
            remove_placement_group(group)

    def _has_nodes(self, now: float) -> bool:
        """Return whether enough nodes have joined for the workers to spread, or the wait is over."""
        able = sum(node.cores > 0 for node in self.nodes)
        longest_s = SET_UP_S if self._cluster.sets_up_nodes else NODES_S
        return able >= self._config.min_nodes or now - self._began > longest_s

    def _group(self, slot: Slot, node: Node, gpus: float) -> Any:
        """Reserve resources in Ray. On a node with roles, used by us alone, the role is enough. On another
        node, a worker takes its share of the cores, for the largest number of workers that the node may hold.
        """
        if slot.role.name in node.roles:
            bundle = {slot.role.name: 1.0}
        else:
            ranks = self._config.num_ranks(slot.role)
            bundle = {"CPU": node.cores * ranks * 1000 // most_on(node, self._config) / 1000}
        if gpus:
            bundle["GPU"] = gpus
        return placement_group(
            [bundle], strategy="STRICT_PACK", bundle_label_selector=[{"ray.io/node-id": node.node_id}]
        )
