"""Places workers on nodes, and holds Ray's resources for them. Imports Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray_cluster import RayCluster
from deploy.scaling import most_on
from deploy.slots import Node, Slot, choose
from protocol.config import ServeConfig

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
        held = {
            node.node_id: [other.place for other in self.on(node) if other is not slot] for node in self.nodes
        }
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
