"""Changes the number of workers: refuses impossible targets, and chooses the workers that leave."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from deploy.config import draft_workers_refusal
from deploy.slots import Node, Slot
from protocol.config import ServeConfig
from protocol.roles import MAX_WORKERS, ROLES, RoleSpec
from router.scaling.interface import ScaleAnswer, ScaleRequest

WORKERS_PER_CORE = 4
"""The most workers per core of a CPU node without roles, since each has threads and memory."""


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
        serve = {
            each.worker_id for each in staying if each.ready_since is not None or each.worker_id in worth
        }
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
