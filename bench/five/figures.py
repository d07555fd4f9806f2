"""From outcomes of cells to what each technique brings, for each workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bench.five.effects import Cell, Effect, all_against_none, cells_of, effects
from bench.five.measure import Outcome
from bench.five.workloads import WORKLOADS


class Figure(msgspec.Struct, frozen=True):
    """Effects on one figure. `all_on` is all techniques on over all off."""

    name: str
    unit: str
    effects: list[Effect]
    all_on: float


class Finding(msgspec.Struct, frozen=True):
    """`floored` are cells of which no rate met the objective: they count with the lowest that was tried, so
    the effects of what would have helped them are at least so large.
    """

    workload: str
    factors: list[str]
    repeats: int
    figures: list[Figure]
    floored: list[str]


def finding(workload: str, factors: Sequence[str], outcomes: Sequence[Outcome], price: float) -> Finding:
    """Raises ValueError that names a cell which lacks a repeat."""
    mine = [outcome for outcome in outcomes if outcome.workload == workload]
    load = WORKLOADS[workload]

    columns: list[tuple[str, str, Callable[[Outcome], float]]] = [
        ("goodput", "requests/s", lambda outcome: outcome.goodput),
        ("TTFT", "s", lambda outcome: outcome.light.ttft_s),
        ("TPOT", "s", lambda outcome: outcome.light.tpot_s),
        ("memory", "bytes", lambda outcome: float(outcome.memory_bytes)),
        ("cost", "a million tokens", lambda outcome: outcome.cost(load, price)),
    ]
    figures = []
    for name, unit, value in columns:
        values = values_of(factors, mine, value)
        found = effects(factors, values)
        figures.append(Figure(name, unit, found, all_against_none(factors, values)))
    floored = ["+".join(outcome.cell) or "none" for outcome in mine if outcome.best is None]
    repeats = max(outcome.repeat for outcome in mine) + 1
    return Finding(workload, list(factors), repeats, figures, floored)


def values_of(
    factors: Sequence[str], outcomes: Sequence[Outcome], value: Callable[[Outcome], float]
) -> dict[Cell, list[float]]:
    """Of each cell of the design, in the order of the repeats."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.repeat)
    return {
        cell: [value(outcome) for outcome in ordered if frozenset(outcome.cell) == cell]
        for cell in cells_of(factors)
    }
