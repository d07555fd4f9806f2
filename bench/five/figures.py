"""The effects of each technique, computed from the outcomes of cells, for each workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bench.five.effects import Effect, all_against_none, effects
from bench.five.factors import cells_of
from bench.five.measure import CellOutcome, ExperimentSetting


class FigureEffects(msgspec.Struct, frozen=True):
    """Effects on one figure. `all_on` is the ratio of all techniques on to all off."""

    name: str
    unit: str
    effects: list[Effect]
    all_on: float


class WorkloadFinding(msgspec.Struct, frozen=True):
    """Effects on one workload. `floored` holds cells in which no rate met the objective. These count with the
    lowest rate tried, so techniques that would help them have at least the shown effect.
    """

    workload: str
    factors: list[str]
    repeats: int
    figures: list[FigureEffects]
    floored: list[str]


def finding(
    setting: ExperimentSetting,
    workload: str,
    factors: Sequence[str],
    outcomes: Sequence[CellOutcome],
    price: float,
) -> WorkloadFinding:
    """Compute the finding of a workload; a simulated one has no memory. Raises ValueError that names a cell
    without a repeat.
    """
    mine = sorted((each for each in outcomes if each.workload == workload), key=lambda each: each.repeat)
    columns: list[tuple[str, str, Callable[[CellOutcome], float]]] = [
        ("goodput", "requests/s", lambda outcome: outcome.goodput),
        ("TTFT", "s", lambda outcome: outcome.light.ttft_s),
        ("TPOT", "s", lambda outcome: outcome.light.tpot_s),
        ("memory", "bytes", lambda outcome: float(outcome.memory_bytes)),
        ("cost", "a million tokens", lambda outcome: outcome.cost(setting, price)),
    ]
    if setting.simulated:
        columns = [column for column in columns if column[0] != "memory"]
    figures = []
    for name, unit, value in columns:
        values = {
            cell: [value(outcome) for outcome in mine if frozenset(outcome.cell) == cell]
            for cell in cells_of(factors)
        }
        found, all_on = effects(factors, values), all_against_none(factors, values)
        figures.append(FigureEffects(name, unit, found, all_on))
    floored = ["+".join(outcome.cell) or "none" for outcome in mine if outcome.best is None]
    return WorkloadFinding(workload, list(factors), mine[-1].repeat + 1, figures, floored)
