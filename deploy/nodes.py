"""The nodes of a Ray cluster, and which of them takes the next worker of a role."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.roles import ROLES

Held = Mapping[str, Sequence[str]]
"""The roles of the workers that nodes have, by the nodes' ids."""


@dataclass(frozen=True)
class Node:
    """`cores` and `gpus` are what Ray counts there. A node with `roles` takes as many workers of each as they
    say, others any number of any role.
    """

    node_id: str
    address: str
    cores: int
    gpus: float = 0.0
    roles: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Node:
        """As `ray.nodes()` describes it. Its custom resources with names of roles are its roles."""
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
    """The node for one more worker, with all of its `ranks`; None where none has room.

    Where some have GPUs these alone; a node is distrusted (by its id) if its workers fell silent at once, and
    comes last, and before it one with fewer cores than ranks. Of the others it is the one with the most cores
    for each of its workers.
    """
    fit = [node for node in nodes if node.has_room(role, held.get(node.node_id, ()))]
    if any(node.gpus for node in nodes):
        fit = [node for node in fit if node.gpus]

    def cost(node: Node) -> tuple[bool, bool, float]:
        few = node.cores < ranks
        return node.node_id in distrusted, few, (len(held.get(node.node_id, ())) + 1) / node.cores

    return min(fit, key=cost, default=None)
