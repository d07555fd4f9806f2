"""The nodes of a Ray cluster. Chooses the node for a role's next worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.roles import ROLES

Held = Mapping[str, Sequence[str]]
"""The roles of each node's workers, by node id."""


@dataclass(frozen=True)
class Node:
    """A node with the `cores` and `gpus` that Ray counts there. `roles` limits the workers of each role; a
    node without `roles` takes any number of any role.
    """

    node_id: str
    address: str
    cores: int
    gpus: float = 0.0
    roles: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Node:
        """Return the node that an entry of `ray.nodes()` describes. Custom resources named like roles are
        its roles.
        """
        resources = described["Resources"]
        return cls(
            node_id=described["NodeID"],
            address=described["NodeManagerAddress"],
            cores=int(resources.get("CPU", 0)),
            gpus=float(resources.get("GPU", 0)),
            roles={name: int(resources[name]) for name in ROLES if name in resources},
        )

    def has_room(self, role: str, held: Sequence[str]) -> bool:
        return self.cores > 0 and (not self.roles or held.count(role) < self.roles.get(role, 0))

    def __str__(self) -> str:
        roles = ", ".join(f"{role}: {number}" for role, number in self.roles.items())
        return f"{self.address} ({self.cores} cores{', ' + roles if roles else ''})"


def choose(
    role: str, nodes: Sequence[Node], held: Held, distrusted: Collection[str] = (), ranks: int = 1
) -> Node | None:
    """Choose the node for one more worker, with all of its `ranks`. Returns None if no node has room.

    If any node has GPUs, only those nodes count. The chosen node has the most cores for each of its workers.
    Nodes with fewer cores than ranks come later; last come the `distrusted` nodes (by id), whose hosts do
    not answer.
    """
    fit = [node for node in nodes if node.has_room(role, held.get(node.node_id, ()))]
    if any(node.gpus for node in nodes):
        fit = [node for node in fit if node.gpus]

    def cost(node: Node) -> tuple[bool, bool, float]:
        few = node.cores < ranks
        return node.node_id in distrusted, few, (len(held.get(node.node_id, ())) + 1) / node.cores

    return min(fit, key=cost, default=None)
