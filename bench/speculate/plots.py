"""Plots of speedup over K, and over concurrency, with a panel for each load and way to speculate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.speculate.figures import CaseFigures, SpeculationVerdict, verdicts_of

Panel = tuple[str, float, str]
"""Workload, temperature, way to speculate."""


def plot_over_k(figures: Sequence[CaseFigures], path: Path) -> None:
    """Plot a line for each concurrency, with a dashed prediction in its colour and a star for auto at the
    right.
    """

    def draw(axes: Any, chosen: Sequence[CaseFigures]) -> None:
        for concurrency in sorted({figure.case.block.concurrency for figure in chosen}):
            line = {
                figure.case.num_tokens: figure
                for figure in chosen
                if figure.case.block.concurrency == concurrency
            }
            tokens = sorted(k for k in line if isinstance(k, int))
            speedups = [line[k].speedup for k in tokens]
            [drawn] = axes.plot(tokens, speedups, "-o", label=str(concurrency))
            predicted = [line[k].predicted for k in tokens]
            if None not in predicted:
                axes.plot(tokens, predicted, "--", color=drawn.get_color(), alpha=0.6)
            if "auto" in line:
                right = max(tokens, default=0) + 1
                axes.plot([right], [line["auto"].speedup], "*", color=drawn.get_color(), markersize=10)

    note = "solid: measured, dashed: tau / (v + K c), star: auto"
    _panels(figures, path, draw, xlabel="K", legend="concurrency", note=note)


def plot_over_concurrency(figures: Sequence[CaseFigures], path: Path) -> None:
    """Plot a line for each K, and a vertical line where the best K of the lowest concurrency stops paying."""

    def draw(axes: Any, chosen: Sequence[CaseFigures]) -> None:
        for num_tokens in dict.fromkeys(figure.case.num_tokens for figure in chosen):
            if num_tokens is None:
                continue
            line = sorted(
                (figure for figure in chosen if figure.case.num_tokens == num_tokens),
                key=lambda figure: figure.case.block.concurrency,
            )
            style = "-k*" if num_tokens == "auto" else "-o"
            concurrency = [figure.case.block.concurrency for figure in line]
            axes.plot(concurrency, [figure.speedup for figure in line], style, label=str(num_tokens))
        measured = sorted({figure.case.block.concurrency for figure in chosen})
        axes.set_xscale("log", base=2)
        axes.set_xticks(measured, [str(concurrency) for concurrency in measured])
        [verdict] = verdicts_of(chosen)
        _mark_crossover(axes, verdict)

    _panels(figures, path, draw, xlabel="concurrency", legend="K", note="")


def _mark_crossover(axes: Any, verdict: SpeculationVerdict) -> None:
    if verdict.crossover is not None:
        axes.axvline(verdict.crossover, color="tab:red", linestyle=":")
        text = f" no gain from {verdict.crossover:.0f}"
        axes.annotate(text, (verdict.crossover, 0.05), color="tab:red", fontsize="small")


def _panels(
    figures: Sequence[CaseFigures],
    path: Path,
    draw: Callable[[Any, Sequence[CaseFigures]], None],
    xlabel: str,
    legend: str,
    note: str,
) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys(_panel(figure) for figure in figures))
    columns = len({drafting for _, _, drafting in panels})
    rows = -(-len(panels) // columns)
    grid, all_axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.6 * rows), squeeze=False)
    for axes, panel in zip(all_axes.flat, panels, strict=False):
        draw(axes, [figure for figure in figures if _panel(figure) == panel])
        workload, temperature, drafting = panel
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(xlabel=xlabel, ylabel="speedup", title=f"{drafting}, {workload}, T={temperature:g}", ylim=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(title=legend, fontsize="small")
    for axes in list(all_axes.flat)[len(panels) :]:
        axes.set_visible(False)
    grid.text(0.01, 0.002, note, fontsize="small")
    grid.tight_layout()
    grid.savefig(path)
    pyplot.close(grid)


def _panel(figure: CaseFigures) -> Panel:
    block = figure.case.block
    return block.workload, block.temperature, block.drafting
