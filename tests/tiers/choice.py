"""Chooses the tests of the fast tier: all cheap ones, and the expensive ones that are worth their
cost now.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.tiers.costs import Cost, Costs, split

TENTHS = 10
"""The dearest tests aside, ten consecutive commits together run every expensive test."""
DEAREST_CPU_S = 12.0
"""A test that costs more runs only if it is a canary, or if its module changed and the bound allows it."""
CHEAPEST_CPU_S = 3.0
"""The cheapest test of a module with expensive tests alone runs at each commit if it costs at most this."""
CHANGED_CPU_S = 60.0
"""The most that tests of changed modules and tests that the diff reaches may cost together."""


@dataclass(frozen=True)
class Situation:
    """The circumstances that the choice depends on, besides the tests and their costs."""

    canaries: Collection[str] = ()
    distances: Mapping[str, int] = field(default_factory=dict)
    """The number of imports from each test module to the nearest changed file."""
    whole: Collection[str] = ()
    """Modules of which all tests run, whatever they cost."""
    commit: int = 0


@dataclass
class Choice:
    chosen: set[str] = field(default_factory=set)
    left_out: dict[str, Cost] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    """Tests that the diff reaches but that are left out."""


def choose(tests: Sequence[str], costs: Costs, situation: Situation) -> Choice:
    expensive = {test: cost for test in tests if (cost := costs.of(test))}
    fair = {test: cost for test, cost in expensive.items() if cost.cpu_s <= DEAREST_CPU_S}
    chosen = set(tests) - expensive.keys()
    chosen |= expensive.keys() & set(situation.canaries)
    chosen |= {test for test in expensive if split(test)[0] in situation.whole}
    chosen |= _tenths(fair)[situation.commit % TENTHS]
    chosen |= _touched(expensive, chosen, situation.distances)
    chosen |= _cheapest(fair, {split(test)[0] for test in chosen})
    left_out = {test: cost for test, cost in expensive.items() if test not in chosen}
    return Choice(chosen, left_out, {test for test in left_out if split(test)[0] in situation.distances})


def missing(canaries: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the canaries that do not exist in their modules."""
    known = set(tests)
    modules = {split(test)[0] for test in known}
    return [canary for canary in canaries if canary not in known and split(canary)[0] in modules]


def _cheapest(costs: Mapping[str, Cost], done: Collection[str]) -> set[str]:
    """Return the cheapest test of each module of which none runs yet, within the bound."""
    cheapest: dict[str, str] = {}
    for test in sorted(costs, key=lambda test: (costs[test].cpu_s, test), reverse=True):
        if costs[test].cpu_s <= CHEAPEST_CPU_S:
            cheapest[split(test)[0]] = test
    return {test for path, test in cheapest.items() if path not in done}


def _tenths(costs: Mapping[str, Cost]) -> list[set[str]]:
    """Divide these tests into parts of equal cost. A module's tests stay together, since they share
    fixtures.
    """
    parts: list[set[str]] = [set() for _ in range(TENTHS)]
    spent_s = [0.0] * TENTHS
    for tests in sorted(_modules(costs).values(), key=lambda tests: (-_sum(costs, tests), min(tests))):
        least = spent_s.index(min(spent_s))
        parts[least] |= set(tests)
        spent_s[least] += _sum(costs, tests)
    return parts


def _touched(costs: Mapping[str, Cost], chosen: Collection[str], distances: Mapping[str, int]) -> set[str]:
    """Return tests of changed modules, then tests that the diff reaches, nearest first, up to the bound.

    Of equally near modules the cheaper one comes first, and in it the cheapest test.
    """
    modules = {module: tests for module, tests in _modules(costs).items() if module in distances}
    found, spent_s = set(), 0.0
    for module in sorted(
        modules, key=lambda module: (distances[module], _sum(costs, modules[module]), module)
    ):
        for test in sorted(modules[module], key=lambda test: (costs[test].cpu_s, test)):
            is_fair = distances[module] == 0 or costs[test].cpu_s <= DEAREST_CPU_S
            if test not in chosen and is_fair:
                spent_s += costs[test].cpu_s
                if spent_s > CHANGED_CPU_S:
                    return found
                found.add(test)
    return found


def _modules(tests: Iterable[str]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for test in tests:
        modules.setdefault(split(test)[0], []).append(test)
    return modules


def _sum(costs: Mapping[str, Cost], tests: Iterable[str]) -> float:
    return math.fsum(costs[test].cpu_s for test in tests)  # the sum is the same in any order
