"""Reads and writes the costs of tests, which tests/costs.json records."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = "tests/costs.json"
CHEAP_CPU_S = 0.5
"""A test that costs at most this is cheap and so in the fast tier. The file does not list it by name."""
STEADY = 1.5
"""A recorded figure stays until a new one differs by this factor, so noise moves no test between tiers."""
COMPARED = 20
"""Two recordings need this many common tests to compare the speeds of their machines."""


@dataclass(frozen=True)
class Cost:
    cpu_s: float
    wall_s: float


@dataclass
class Module:
    """Costs of a test module: the sum over its cheap tests, and each expensive test by its name."""

    cheap: Cost
    expensive: dict[str, Cost] = field(default_factory=dict)


@dataclass
class Costs:
    modules: dict[str, Module] = field(default_factory=dict)

    def of(self, test: str) -> Cost | None:
        """Return the cost of an expensive test, and None for a cheap or a new one."""
        path, name = split(test)
        module = self.modules.get(path)
        return module.expensive.get(name) if module else None

    def recorded(self, paths: Iterable[str]) -> list[str]:
        """Return the expensive tests of these modules, and an entry for the cheap ones of each."""
        known = [(path, self.modules.get(path)) for path in paths]
        expensive = [f"{path}::{name}" for path, module in known if module for name in module.expensive]
        return [f"{path}::" for path, _ in known] + expensive

    def entry(self, test: str) -> str:
        """Return a test's place in `recorded`: itself, or the entry for the cheap tests of its module."""
        return test if self.of(test) else f"{split(test)[0]}::"

    def estimate(self, tests: Iterable[str]) -> Cost:
        """Return the estimated cost of these tests and the cheap ones of their modules."""
        paths = {split(test)[0] for test in tests} & self.modules.keys()
        found = [self.modules[path].cheap for path in paths] + [
            cost for test in tests if (cost := self.of(test))
        ]
        return Cost(sum(cost.cpu_s for cost in found), sum(cost.wall_s for cost in found))

    def updated(self, recorded: Mapping[str, Cost], root: Path) -> Costs:
        """Return these costs updated by a run's, scaled to the machine of the first recording.

        The run replaces the modules of which it ran tests. Modules without a file are dropped.
        """
        scale = self._scale(recorded)
        by_module: dict[str, dict[str, Cost]] = {}
        for test, cost in recorded.items():
            path, name = split(test)
            by_module.setdefault(path, {})[name] = Cost(cost.cpu_s * scale, cost.wall_s * scale)
        modules = {path: module for path, module in self.modules.items() if (root / path).exists()}
        for path, tests in by_module.items():
            modules[path] = _updated(self.modules.get(path), tests)
        return Costs(modules)

    def _scale(self, recorded: Mapping[str, Cost]) -> float:
        ratios = [
            old.cpu_s / new.cpu_s for test, new in recorded.items() if (old := self.of(test)) and new.cpu_s
        ]
        return statistics.median(ratios) if len(ratios) >= COMPARED else 1.0


def split(test: str) -> tuple[str, str]:
    """Split a test's id into the path of its module and its name there."""
    path, _, name = test.partition("::")
    return path, name


def load(root: Path) -> Costs:
    file = root / FILE
    if not file.exists():
        return Costs()
    return Costs(
        {
            path: Module(Cost(*row["cheap"]), {name: Cost(*cost) for name, cost in row["expensive"].items()})
            for path, row in json.loads(file.read_text()).items()
        }
    )


def dump(costs: Costs, root: Path) -> None:
    """Write one line for each module and for each expensive test, sorted to keep diffs short."""
    modules = ",\n".join(_lines(path, module) for path, module in sorted(costs.modules.items()))
    (root / FILE).write_text(f"{{\n{modules}\n}}\n")


def _lines(path: str, module: Module) -> str:
    head = f' {json.dumps(path)}: {{"cheap": {_figures(module.cheap)}, "expensive": {{'
    tests = [f"  {json.dumps(name)}: {_figures(cost)}" for name, cost in sorted(module.expensive.items())]
    return head + ("\n" + ",\n".join(tests) + "\n " if tests else "") + "}}"


def _figures(cost: Cost) -> str:
    return f"[{cost.cpu_s:g}, {cost.wall_s:g}]"


def _updated(old: Module | None, tests: Mapping[str, Cost]) -> Module:
    expensive = {}
    for name, cost in tests.items():
        known = old.expensive.get(name) if old else None
        kept = _steady(known, cost)
        if kept.cpu_s > CHEAP_CPU_S * (STEADY if old and not known else 1):
            expensive[name] = kept
    cheap = [cost for name, cost in tests.items() if name not in expensive]
    whole = Cost(sum(cost.cpu_s for cost in cheap), sum(cost.wall_s for cost in cheap))
    return Module(_steady(old.cheap if old else None, whole), expensive)


def _steady(old: Cost | None, new: Cost) -> Cost:
    if old is None:
        return Cost(_rounded(new.cpu_s), _rounded(new.wall_s))
    return Cost(_kept(old.cpu_s, new.cpu_s), _kept(old.wall_s, new.wall_s))


def _kept(old: float, new: float) -> float:
    return old if old / STEADY <= new <= old * STEADY else _rounded(new)


def _rounded(seconds: float) -> float:
    """Round to two digits, the measurement's precision."""
    return float(f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}")
