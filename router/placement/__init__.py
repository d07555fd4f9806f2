"""Placement policies, by name: one rule for prefill and one for decode, or `cost` for both at once."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import ConfigError
from protocol.fields import named
from protocol.roles import Task
from router.placement.by_cost import cost, place_by_cost, split, whole
from router.placement.cluster import Cluster
from router.placement.interface import (
    Placement,
    PolicyResult,
    PolicyState,
    Refusal,
    RequestFacts,
    WorkerSnapshot,
)
from router.placement.predict import best_holder, decode_cost, prefill_cost
from router.placement.rules import (
    Rule,
    cache_aware,
    is_overloaded,
    least_loaded,
    power_of_two,
    round_robin,
)

RULES: dict[str, Rule] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "cache_aware": cache_aware,
    "cost": cost,
}


@dataclass(frozen=True)
class PlacementPolicy:
    prefill: Rule
    decode: Rule

    def place(self, request: RequestFacts, cluster: Cluster, state: PolicyState) -> PolicyResult:
        """Return the request's placement and the state for the next call."""
        if self.prefill is cost and self.decode is cost:
            return place_by_cost(request, cluster), state.next()
        return self._place(request, cluster, state), state.next()

    def next_decode(self, request: RequestFacts, cluster: Cluster, state: PolicyState) -> str | None:
        """Return the decode worker for a prompt that is already computed; None if no worker decodes."""
        worker = self._chosen("decode", request, cluster, state)
        return worker.worker_id if worker is not None else None

    def _place(self, request: RequestFacts, cluster: Cluster, state: PolicyState) -> Placement | Refusal:
        """Place by separate rules. A prefill worker that holds the prompt is chosen whatever its load."""
        held = cluster.get(request.prefix_at)
        prefill = held if held is not None and held.purpose == "prefill" else None
        if prefill is None:
            prefill = self._chosen("prefill", request, cluster, state)
        decode = self._chosen("decode", request, cluster, state)
        missing: Task | None = None
        splits = request.disaggregate and request.split is not False
        if prefill is not None and decode is not None and splits:
            first, last = prefill, decode
        elif decode is not None:
            first = last = decode
            missing = "prefill" if splits else None
        elif prefill is not None and "decode" in prefill.tasks:
            first = last = prefill
            missing = "decode"
        else:
            return Refusal("no worker is ready")
        costs = prefill_cost(request, first, best_holder(request, cluster)), decode_cost(request, last)
        option = whole(*costs) if first is last else split(request, *costs)
        return Placement(option.workers, missing, option.prefix, option.predicted)

    def _chosen(
        self, task: Task, request: RequestFacts, cluster: Cluster, state: PolicyState
    ) -> WorkerSnapshot | None:
        """Return the worker for one task. A session goes to its own worker unless that is overloaded."""
        if request.session:
            home = cluster.home(task, request.session, request.avoid)
            if home is not None and not is_overloaded(home, cluster):
                return home
        return (self.prefill if task == "prefill" else self.decode)(request, cluster, task, state)


def placement_policy(both: str, prefill: str | None = None, decode: str | None = None) -> PlacementPolicy:
    """Return the policy of the named rules, ours or `module:name` of your own. Raises `ConfigError`."""
    _rule("--placement", both)
    first, second = prefill or both, decode or both
    return PlacementPolicy(_rule("--prefill-placement", first), _rule("--decode-placement", second))


def _rule(flag: str, name: str) -> Rule:
    if ":" not in name:
        if name not in RULES:
            raise ConfigError(
                f"{flag}: unknown policy {name!r}; known: {', '.join(RULES)}, and module:name of your own"
            )
        return RULES[name]
    rule: Rule = named(name, flag)
    if not callable(rule):
        raise ConfigError(f"{flag}: {name} is no function")
    return rule
