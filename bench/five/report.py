"""Shows the findings as tables and one figure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.five.effects import Cell, Effect, cells_of, name_of
from bench.five.factors import TITLES
from bench.five.figures import WorkloadFinding
from bench.five.measure import CellOutcome, ExperimentSetting
from bench.five.workloads import WORKLOADS
from bench.record import made_by

INTRODUCTION = """\
Each technique is on or off in every combination. A cell's goodput is the highest rate of requests of which
{attainment:.0%} had their first token within {ttft:g} s and the others within {tpot:g} s each; those count.
TTFT and TPOT are medians at one low rate, the same for all cells; memory is what the server's processes hold;
the cost is that of a million output tokens at {price:g} per worker-hour, at the cell's goodput. Effects are
ratios: the figure with the technique over that without, averaged over all states of the others (geometric
mean), and for two techniques, how many times the first one's effect is with the second what it is without. In
brackets 95 % intervals; bold where they leave out 1."""


def as_markdown(
    command: str,
    setting: ExperimentSetting,
    price: float,
    findings: Sequence[WorkloadFinding],
    outcomes: Sequence[CellOutcome],
) -> str:
    objective = setting.objective
    text = INTRODUCTION.format(
        attainment=objective.attainment, ttft=objective.ttft_s, tpot=objective.tpot_s, price=price
    )
    lines = ["# Five techniques", "", made_by(command), "", text, "", "![effects](effects.svg)"]
    for finding in findings:
        lines += ["", *section(finding)]
        mine = [outcome for outcome in outcomes if outcome.workload == finding.workload]
        lines += ["", *_cells(finding, mine, price)]
    return "\n".join(lines) + "\n"


def section(finding: WorkloadFinding) -> list[str]:
    """Return the tables of one workload: main effects, interactions, and all on against all off."""
    names = [figure.name for figure in finding.figures]
    rule = "|---|" + "--:|" * len(names)
    title = f"## {finding.workload}, {finding.repeats} repeats"
    lines = [title, "", f"| technique | {' | '.join(names)} |", rule]
    for factors in [(name,) for name in finding.factors] + list(combinations(finding.factors, 2)):
        found = [next(e for e in figure.effects if e.factors == factors) for figure in finding.figures]
        title = " x ".join(TITLES[name] for name in factors)
        lines.append(f"| {title} | {' | '.join(map(_effect, found))} |")
    lines.append(f"| all on over all off | {' | '.join(f'{f.all_on:.2f}' for f in finding.figures)} |")
    if finding.floored:
        lines += [
            "",
            f"No rate met the SLO in: {', '.join(finding.floored)}. These count with the lowest tried.",
        ]
    return lines


def _effect(effect: Effect) -> str:
    text = f"{effect.ratio:.2f}"
    if effect.is_certain:
        text = f"**{text}**"
    return text if effect.low is None else f"{text} ({effect.low:.2f} to {effect.high:.2f})"


def _cells(finding: WorkloadFinding, outcomes: Sequence[CellOutcome], price: float) -> list[str]:
    lines = [
        "| on | requests/s | TTFT, ms | TPOT, ms | memory, MiB | cost |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for cell in cells_of(finding.factors):
        mine = [outcome for outcome in outcomes if frozenset(outcome.cell) == cell]
        lines.append(_cell(cell, mine, price))
    return lines


def _cell(cell: Cell, outcomes: Sequence[CellOutcome], price: float) -> str:
    """Return the table row of a cell, with means over the repeats."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    workload = WORKLOADS[outcomes[0].workload]
    return (
        f"| {name_of(cell)} | {mean([each.goodput for each in outcomes]):.2f} "
        f"| {mean([each.light.ttft_s for each in outcomes]) * 1e3:.1f} "
        f"| {mean([each.light.tpot_s for each in outcomes]) * 1e3:.2f} "
        f"| {mean([each.memory_bytes for each in outcomes]) / 2**20:.0f} "
        f"| {mean([each.cost(workload, price) for each in outcomes]):.3g} |"
    )


def plot(findings: Sequence[WorkloadFinding], path: Path) -> None:
    """Plot a row for each workload: main effects with their intervals, and interactions on goodput."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(findings), 2, figsize=(12, 3.6 * len(findings)), squeeze=False, layout="constrained"
    )
    for finding, (bars, square) in zip(findings, grid, strict=True):
        _plot_effects(bars, finding)
        _plot_interactions(square, finding)
    figure.savefig(path)
    pyplot.close(figure)


def _plot_effects(axes: Any, finding: WorkloadFinding) -> None:
    width = 0.8 / len(finding.figures)
    for number, figure in enumerate(finding.figures):
        mains = [effect for effect in figure.effects if len(effect.factors) == 1]
        places = [place + (number - (len(finding.figures) - 1) / 2) * width for place in range(len(mains))]
        ratios = [effect.ratio for effect in mains]
        below = [effect.ratio - (effect.low or effect.ratio) for effect in mains]
        above = [(effect.high or effect.ratio) - effect.ratio for effect in mains]
        heights = [ratio - 1 for ratio in ratios]
        axes.bar(places, heights, width, bottom=1, yerr=[below, above], capsize=2, label=figure.name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(finding.factors)), [TITLES[name] for name in finding.factors], fontsize="small")
    axes.set(title=f"{finding.workload}: with over without", ylabel="ratio")
    axes.legend(fontsize="small", ncols=3)


def _plot_interactions(axes: Any, finding: WorkloadFinding) -> None:
    names = finding.factors
    found = {effect.factors: effect for effect in finding.figures[0].effects}
    square = [[float("nan")] * len(names) for _ in names]
    for one, other in combinations(range(len(names)), 2):
        effect = found[names[one], names[other]]
        square[other][one] = effect.ratio
        style = "bold" if effect.is_certain else "normal"
        axes.text(one, other, f"{effect.ratio:.2f}", ha="center", va="center", weight=style)
    axes.imshow(square, cmap="RdBu", vmin=0, vmax=2)
    titles = [TITLES[name] for name in names]
    axes.set_xticks(range(len(names)), titles, rotation=20, fontsize="small")
    axes.set_yticks(range(len(names)), titles, fontsize="small")
    axes.set_title(f"{finding.workload}: interactions on goodput")
