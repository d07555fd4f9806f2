"""The workers that the supervisor keeps running, in any incarnation, the nodes that they run on, and changes
of their number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from deploy.config import draft_workers_refusal
from deploy.resources import WORKERS_PER_CORE
from protocol.config import ServeConfig
from protocol.roles import MAX_WORKERS, ROLES, RoleSpec
from router.scaling.interface import ScaleAnswer, ScaleRequest

Held = Mapping[str, Sequence[str]]
"""The roles of each node's workers, by node id."""


@dataclass(frozen=True)
class Node:
    """A node as Ray counts it. `roles` limits the workers of each role; if empty, any roles fit."""

    node_id: str
    address: str
    cores: int
    gpus: float = 0.0
    roles: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Node:
        """Return the node of an entry of `ray.nodes()`. Resources named like roles become its roles."""
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


FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
"""Seconds of running after which a worker's earlier failures are forgotten."""

FRAIL_S = 5.0
"""A worker whose process vanishes this soon after it became ready is itself at fault."""

UNTOLD_S = 10.0
"""A worker that still runs this long after --drain-timeout was never told to leave: its router was lost."""


@dataclass(eq=False)
class Slot:
    """The place of one worker, through all its incarnations."""

    worker_id: str
    role: RoleSpec
    incarnation: str = ""
    node: Node | None = None
    placed_as: str | None = None
    """The role that the worker had when it was placed on its node. A change of role does not change it."""
    group: Any = None
    """The placement group that reserves the worker's place on its node."""
    actor: Any = None
    ended: Any = None
    ping: Any = None
    """The unanswered call to the actor, made because the worker is silent."""
    look: Any = None
    """The unanswered call of the actor's `look`, made while the worker starts."""
    looked_at: float = 0.0
    """The time of the last call of `look`."""
    seen: Any = None
    """The actor's latest answer, an `ActorState`."""
    num_replaced: int = 0
    """The number of replaced templates that the actor has reported."""
    reminded_at: float = 0.0
    """The time when the log last named the reason for the wait."""
    config: ServeConfig = field(default_factory=ServeConfig)
    """The deployment's configuration, adapted to the worker's node."""
    gpus: float = 0.0
    """The share of GPUs that the actor holds."""
    process: psutil.Process | None = None
    started: float = 0.0
    ready_since: float | None = None
    was_ready: bool = False
    failures: int = 0
    """Number of the worker's failures in a row."""
    failed_starts: int = 0
    """Number of deaths in a row before the worker was ready."""
    start_at: float | None = None
    added_at: float | None = None
    """The time when scaling added the worker; then its failure to start ends no other worker."""
    leaves: bool = False
    """Whether the worker is drained and then not restarted."""
    changes: bool = False
    """Whether the worker is drained, and continues in another role or as another process."""
    let_go_at: float = 0.0
    """The time when a router was last allowed to drain the worker."""
    dismissed_at: float | None = None
    """The time when the supervisor noticed that the router let the worker end by itself."""

    @property
    def place(self) -> str:
        """The role whose place on a node the worker has, or will get."""
        return self.placed_as or self.role.name

    @property
    def stays_to_decode(self) -> bool:
        return self.role.purpose == "decode" and not self.leaves and not self.changes

    def take_back(self, drain_timeout: float, now: float) -> bool:
        """Return whether the worker stays, because the router that wanted to drain it was lost."""
        stays = (self.leaves or self.changes) and now - self.let_go_at > drain_timeout + UNTOLD_S
        if stays:
            self.leaves = self.changes = False
        return stays

    def note_death(self, vanished: bool, now: float) -> float:
        """Return the seconds until the next start: 0 unless the worker fails repeatedly.

        A ready worker that `vanished` was killed or stopped from outside; a worker that fails gives a reason.
        """
        lived = now - self.ready_since if self.ready_since is not None else 0.0
        if lived > STABLE_S:
            self.failures = 0
        if not vanished or lived < FRAIL_S:
            self.failures += 1
        self.failed_starts = 0 if self.ready_since is not None else self.failed_starts + 1
        self.ready_since = None
        again = self.failures - 1
        return min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (again - 1)) if again > 0 else 0.0


def make_slots(config: ServeConfig) -> list[Slot]:
    """Return a slot for each worker of the deployment."""
    roles = [(role, config.num_replicas(role)) for role in ROLES.values()]
    return [Slot(f"{role.name}-{index}", role) for role, number in roles for index in range(number)]


def let_go(slots: Sequence[Slot], worker_id: str, for_good: bool) -> str:
    """Mark a worker as leaving or changing its role. Returns "", or the reason why it cannot."""
    slot = slot_of(slots, worker_id)
    if slot is None:
        return "it has left already"
    if not any(other.stays_to_decode for other in slots if other is not slot):
        return "no other decode worker stays"
    if (slot.leaves or slot.changes) and slot.leaves != for_good:
        return "it leaves or changes its role already"
    slot.leaves, slot.changes, slot.let_go_at = for_good, not for_good, time.monotonic()
    return ""


def slot_of(slots: Sequence[Slot], worker_id: str) -> Slot | None:
    return next((slot for slot in slots if slot.worker_id == worker_id), None)


def rescale(
    slots: list[Slot], request: ScaleRequest, config: ServeConfig, nodes: Sequence[Node], may_grow: bool
) -> ScaleAnswer:
    """Mark workers as leaving, and add slots for new ones. `may_grow`: Ray may add nodes."""
    targets = request.targets
    field, refusal = why_refused(slots, targets, config, nodes, may_grow)
    if refusal:
        return ScaleAnswer(refusal=refusal, field=field)
    started: list[str] = []
    leaving: list[str] = []
    for role, count in targets.items():
        staying = [slot for slot in slots if slot.role.name == role and not slot.leaves]
        worth = {worker_id: place for place, worker_id in enumerate(request.worth)}
        # A router may know of a ready worker before the supervisor does.
        ready = (each for each in staying if each.ready_since is not None or each.worker_id in worth)
        serve = {each.worker_id for each in ready}
        staying.sort(key=lambda slot: (slot.worker_id in serve, worth.get(slot.worker_id, -1)))
        for slot in staying[: max(len(staying) - count, 0)]:
            slot.leaves, slot.let_go_at = True, time.monotonic()
            if slot.worker_id in serve:
                slot.ready_since = slot.ready_since or slot.let_go_at
                leaving.append(slot.worker_id)
        for _ in range(count - len(staying)):
            slot = _added(ROLES[role], slots)
            slots.append(slot)
            started.append(slot.worker_id)
    return ScaleAnswer(started=started, leaving=leaving)


def _added(role: RoleSpec, slots: Sequence[Slot]) -> Slot:
    """Return a slot with the first free name. Names of leaving workers are not free."""
    taken, now = {slot.worker_id for slot in slots}, time.monotonic()
    names = (f"{role.name}-{number}" for number in range(len(slots) + 1))
    return Slot(next(name for name in names if name not in taken), role, start_at=now, added_at=now)


def why_refused(
    slots: Sequence[Slot],
    targets: Mapping[str, int],
    config: ServeConfig,
    nodes: Sequence[Node],
    may_grow: bool,
) -> tuple[str, str]:
    """Return the first field with an impossible target and the reason, or ("", "") if all are possible."""
    for role, count in targets.items():
        reason = _outside(ROLES[role], count, config)
        if reason:
            return role, reason
    changing = next((slot.worker_id for slot in slots if slot.changes), None)
    if changing is not None:
        return min(targets, default=""), f"worker {changing} changes its role; ask again after that"
    if may_grow:
        return "", ""
    had = Counter(slot.role.name for slot in slots if not slot.leaves)
    places = _places(slots)
    more = {role: count - had[role] for role, count in targets.items()}
    places.update(more)
    for role, count in targets.items():
        most = count + most_of(role, nodes, places, config) - places[role]
        if count > max(most, had[role]):
            return (role, f"the nodes take at most {max(most, 0)} next to the other workers, got {count}")
    return "", ""


def _outside(role: RoleSpec, count: int, config: ServeConfig) -> str:
    if role.needs_disaggregation and not config.disaggregation:
        return f"must be 0 with --no-disaggregation, got {count}" if count else ""
    if role.holds_draft:
        refusal = draft_workers_refusal(config) if count else ""
        if refusal:
            return refusal
        if count and config.num_replicas(role) == 0:
            return f"needs --draft-replicas above 0 at the start, for decode workers to listen; got {count}"
    bounds = (config.autoscale or {}).get(role.name)
    least = least_of(role, config)
    if count < least:
        return f"must be at least {least}, got {count}"
    if bounds is not None and not bounds.least <= count <= bounds.most:
        return f"must be within --autoscale {bounds}, got {count}"
    most = config.num_replicas(role)
    if config.kv_events_config is not None and count > most:
        return f"--kv-events-config has ports for {most}, got {count}"
    return ""


def least_of(role: RoleSpec, config: ServeConfig) -> int:
    """Return the least number of workers that the role needs."""
    speculative = config.speculative_config
    if role.holds_draft and (speculative is None or speculative.decode_workers_draft):
        return 0
    return 0 if role.needs_disaggregation and not config.disaggregation else 1


def _places(slots: Sequence[Slot]) -> Counter[str]:
    """Count each role's places on nodes. A worker that changes its role keeps its place."""
    return Counter(slot.place for slot in slots if not slot.leaves)


def most_of(role: str, nodes: Sequence[Node], wanted: Mapping[str, int], config: ServeConfig) -> int:
    """Return how many workers of a role fit on these nodes in addition to other roles' `wanted` workers."""
    places = Counter[str]()
    for node in nodes:
        places.update(node.roles)
    free = sum(shared_places(node, nodes, config) for node in nodes)
    others = {name: max(count - places[name], 0) for name, count in wanted.items() if name != role}
    free -= sum(config.num_ranks(ROLES[name]) * count for name, count in others.items())
    return places[role] + max(free, 0) // config.num_ranks(ROLES[role])


def shared_places(node: Node, nodes: Sequence[Node], config: ServeConfig) -> int:
    """Return how many ranks a node takes, of workers of any role. Returns 0 if the node has roles."""
    if node.roles or node.cores == 0:
        return 0
    if any(other.gpus for other in nodes):
        return max(int(node.gpus), config.total_ranks) if node.gpus else 0
    return most_on(node, config)


def most_on(node: Node, config: ServeConfig) -> int:
    """Return the most ranks that the cores of a node without roles can take."""
    return max(WORKERS_PER_CORE * node.cores, config.total_ranks)


def room(slots: Sequence[Slot], config: ServeConfig, nodes: Sequence[Node], may_grow: bool) -> dict[str, int]:
    """Return how many more workers of each role would fit."""
    if may_grow:
        return dict.fromkeys(ROLES, MAX_WORKERS)
    taken = _places(slots)
    return {role: max(most_of(role, nodes, taken, config) - taken[role], 0) for role in ROLES}


def wanted_bundles(slots: Sequence[Slot], nodes: Sequence[Node]) -> list[dict[str, float]]:
    """Return the resources to ask Ray's autoscaler for: one place for each worker that stays. With nodes
    without roles, a place is a GPU or a core; otherwise it is one of the worker's role.
    """
    shared = [node for node in nodes if node.cores and not node.roles]
    own = {"GPU": 1.0} if any(node.gpus for node in shared) else {"CPU": 1.0}
    return [own if shared else {slot.place: 1.0} for slot in slots if not slot.leaves]
