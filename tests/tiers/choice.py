"""Which tests the fast tier runs: the cheap ones, and of the expensive ones those that are worth it now."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.tiers.costs import Cost, Costs, split

TENTHS = 10
"""So many commits in a row run all expensive tests but the dearest."""
DEAREST_CPU_S = 30.0
"""A test that costs more runs if it is a canary or what it tests has changed."""
REACH_CPU_S = 120.0
"""What tests that the diff reaches may cost together, the nearest first."""


@dataclass(frozen=True)
class Situation:
    """What the choice depends on, besides the tests and their costs."""

    canaries: Collection[str] = ()
    distances: Mapping[str, int] = field(default_factory=dict)
    """How many imports lead from test modules to what has changed."""
    commit: int = 0


@dataclass
class Choice:
    chosen: set[str] = field(default_factory=set)
    left_out: dict[str, Cost] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)
    """Tests that the diff reaches and that are left out all the same."""


def choose(tests: Sequence[str], costs: Costs, situation: Situation) -> Choice:
    known = {test: costs.of(test) for test in tests}
    expensive = {test: cost for test, cost in known.items() if cost}
    chosen = set(tests) - expensive.keys()
    chosen |= expensive.keys() & set(situation.canaries)
    chosen |= _changed(expensive, situation.distances)
    fair = {test: cost for test, cost in expensive.items() if cost.cpu_s <= DEAREST_CPU_S}
    chosen |= _cheapest(fair, {split(test)[0] for test in chosen})
    chosen |= {test for test in fair if _tenth(test) == situation.commit % TENTHS}
    chosen |= _reached({test: cost for test, cost in fair.items() if test not in chosen}, situation.distances)
    left_out = {test: cost for test, cost in expensive.items() if test not in chosen}
    return Choice(chosen, left_out, {test for test in left_out if split(test)[0] in situation.distances})


def missing(canaries: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Return the canaries that are not among these tests, though their modules are."""
    known = set(tests)
    modules = {split(test)[0] for test in known}
    return [canary for canary in canaries if canary not in known and split(canary)[0] in modules]


def _changed(tests: Iterable[str], distances: Mapping[str, int]) -> set[str]:
    """Return all tests of modules that have changed themselves."""
    return {test for test in tests if distances.get(split(test)[0]) == 0}


def _cheapest(costs: Mapping[str, Cost], done: Collection[str]) -> set[str]:
    """Return the cheapest test of each module of which none runs yet."""
    cheapest: dict[str, str] = {}
    for test in sorted(costs, key=lambda test: (costs[test].cpu_s, test), reverse=True):
        cheapest[split(test)[0]] = test
    return {test for path, test in cheapest.items() if path not in done}


def _tenth(test: str) -> int:
    return zlib.crc32(test.encode()) % TENTHS


def _reached(costs: Mapping[str, Cost], distances: Mapping[str, int]) -> set[str]:
    """Return tests that the diff reaches, the nearest first and of these the cheapest, up to the bound."""
    reached = [test for test in costs if split(test)[0] in distances]
    reached.sort(key=lambda test: (distances[split(test)[0]], costs[test].cpu_s, test))
    found, spent_s = set(), 0.0
    for test in reached:
        spent_s += costs[test].cpu_s
        if spent_s > REACH_CPU_S:
            break
        found.add(test)
    return found
