"""Computes the effects of each technique from the outcomes of cells, for each workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from bench.five.effects import Effect, all_against_none, cells_of, effects
from bench.five.measure import CellOutcome
from bench.five.workloads import WORKLOADS


class FigureEffects(msgspec.Struct, frozen=True):
    """Effects on one figure. `all_on` is the ratio of all techniques on to all off."""

    name: str
    unit: str
    effects: list[Effect]
    all_on: float


class WorkloadFinding(msgspec.Struct, frozen=True):
    """Effects on one workload. `floored` are cells in which no rate met the objective: they count with the
    lowest rate that was tried, so techniques that would help them have at least the effect shown.
    """

    workload: str
    factors: list[str]
    repeats: int
    figures: list[FigureEffects]
    floored: list[str]


class Repeated(Protocol):
    """The outcome of a cell in one repeat."""

    @property
    def cell(self) -> list[str]: ...

    @property
    def repeat(self) -> int: ...


T = TypeVar("T", bound=Repeated)

Column = tuple[str, str, Callable[[T], float]]
"""Name and unit of a figure, and a function that reads it from an outcome."""


def finding(
    workload: str, factors: Sequence[str], outcomes: Sequence[CellOutcome], price: float
) -> WorkloadFinding:
    """Compute the finding of a workload. Raises ValueError that names a cell which lacks a repeat."""
    mine = [outcome for outcome in outcomes if outcome.workload == workload]
    load = WORKLOADS[workload]
    columns: list[Column[CellOutcome]] = [
        ("goodput", "requests/s", lambda outcome: outcome.goodput),
        ("TTFT", "s", lambda outcome: outcome.light.ttft_s),
        ("TPOT", "s", lambda outcome: outcome.light.tpot_s),
        ("memory", "bytes", lambda outcome: float(outcome.memory_bytes)),
        ("cost", "a million tokens", lambda outcome: outcome.cost(load, price)),
    ]
    floored = ["+".join(outcome.cell) or "none" for outcome in mine if outcome.best is None]
    repeats = max(outcome.repeat for outcome in mine) + 1
    return WorkloadFinding(workload, list(factors), repeats, figures_of(factors, mine, columns), floored)


def figures_of(
    factors: Sequence[str], outcomes: Sequence[T], columns: Sequence[Column[T]]
) -> list[FigureEffects]:
    """Compute the effects on each column. Raises ValueError that names a cell which lacks a repeat."""
    ordered, found = sorted(outcomes, key=lambda outcome: outcome.repeat), []
    for name, unit, value in columns:
        values = {
            cell: [value(outcome) for outcome in ordered if frozenset(outcome.cell) == cell]
            for cell in cells_of(factors)
        }
        found.append(FigureEffects(name, unit, effects(factors, values), all_against_none(factors, values)))
    return found
