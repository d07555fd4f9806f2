"""Chooses the tests of the fast tier: the cheap ones that the changes reach, and the expensive ones that are
worth their cost now.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.tiers.costs import Cost, Costs, split

TENTHS = 10
"""The dearest tests aside, ten consecutive commits together run every test."""
DEAREST_CPU_S = 12.0
"""A test that costs more runs only if it is a canary, or if its module changed and the bound allows it."""
CHEAPEST_CPU_S = 3.0
"""The cheapest test of a reached module with expensive tests alone runs if it costs at most this."""
CHEAP_CPU_S = 300.0
"""The most that the cheap tests which the diff reaches may cost together."""
CHANGED_CPU_S = 60.0
"""The most that expensive tests of changed modules, and those that the diff reaches, may cost together."""
READING = ("tests/docs/", "tests/test_no_pickle.py", "tests/tiers/")
"""Modules that read the product's files or its documentation, so imports do not tell what reaches them."""
UNKNOWN_CPU_S = 2.0
"""The assumed cost of a module without a record."""


@dataclass(frozen=True)
class Situation:
    """The circumstances that the choice depends on, besides the tests and their costs."""

    canaries: Collection[str] = ()
    distances: Mapping[str, int] = field(default_factory=dict)
    """The number of imports from each test module to the nearest changed file."""
    whole: Collection[str] = ()
    """Modules of which all tests run, whatever they cost."""
    commit: int = 0
    everything: bool = False
    """Whether the changes may reach all modules. Then all cheap tests run."""


@dataclass
class Choice:
    chosen: set[str] = field(default_factory=set)
    left_out: dict[str, Cost] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    """Tests that the diff reaches but that are left out."""


def choose(tests: Sequence[str], costs: Costs, situation: Situation) -> Choice:
    """Choose among tests, or among the entries that `Costs.recorded` returns."""
    expensive = {test: cost for test in tests if (cost := costs.of(test))}
    cheap = _shares([test for test in tests if test not in expensive], costs)
    fair = {test: cost for test, cost in expensive.items() if cost.cpu_s <= DEAREST_CPU_S}
    paths = {split(test)[0] for test in tests}
    reached = paths if situation.everything else paths & situation.distances.keys()
    near = set(nearest(situation.distances, costs, CHEAP_CPU_S)) | (paths - costs.modules.keys())
    near |= {path for path in paths if situation.everything or path.startswith(READING)}
    chosen = {test for test in cheap if split(test)[0] in near}
    chosen |= {costs.entry(test) for test in situation.canaries} & set(tests)
    chosen |= {test for test in expensive if split(test)[0] in situation.whole}
    chosen |= _tenths(cheap | fair)[situation.commit % TENTHS]
    chosen |= _touched(expensive, chosen, situation.distances)
    running = {split(test)[0] for test in chosen}
    chosen |= _cheapest({test: cost for test, cost in fair.items() if split(test)[0] in reached - running})
    left_out = {test: cost for test, cost in (cheap | expensive).items() if test not in chosen}
    return Choice(chosen, left_out, {test for test in left_out if split(test)[0] in situation.distances})


def nearest(distances: Mapping[str, int], known: Costs, bound_cpu_s: float) -> list[str]:
    """Return the nearest modules by imports until the cheap tests of all reach the bound, which the first one
    and changed modules may exceed.
    """
    found: list[str] = []
    cheap = {path: known.modules[path].cheap.cpu_s for path in distances if path in known.modules}
    for path in sorted(distances, key=lambda path: (distances[path], cheap.get(path, UNKNOWN_CPU_S), path)):
        bound_cpu_s -= cheap.get(path, UNKNOWN_CPU_S)
        if found and distances[path] and bound_cpu_s < 0:
            break
        found.append(path)
    return found


def missing(canaries: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the canaries that do not exist in their modules."""
    known = set(tests)
    modules = {split(test)[0] for test in known}
    return [canary for canary in canaries if canary not in known and split(canary)[0] in modules]


def _shares(tests: Sequence[str], costs: Costs) -> dict[str, Cost]:
    """Return the costs of cheap tests: equal shares of what those of a module cost together."""
    shares: dict[str, Cost] = {}
    for path, found in _modules(tests).items():
        cheap = costs.modules[path].cheap if path in costs.modules else Cost(UNKNOWN_CPU_S, UNKNOWN_CPU_S)
        shares |= dict.fromkeys(found, Cost(cheap.cpu_s / len(found), cheap.wall_s / len(found)))
    return shares


def _cheapest(costs: Mapping[str, Cost]) -> set[str]:
    """Return the cheapest test of each module, within the bound."""
    modules = _modules(test for test, cost in costs.items() if cost.cpu_s <= CHEAPEST_CPU_S)
    return {min(tests, key=lambda test: (costs[test].cpu_s, test)) for tests in modules.values()}


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
