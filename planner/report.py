"""Shows a plan: as text, and as a plot over the splits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from planner.drafts import DraftChoice, last_paying
from planner.scenarios import PlanOutcome, Scenario, Slo, best


def print_plan(console: Console, outcomes: Sequence[PlanOutcome], slo: Slo) -> None:
    """Print a line for each layout, then the recommended one."""
    title = (
        f"{outcomes[0].requests} requests, SLO: {slo.ttft_s:g} s to the first token, "
        f"{slo.tpot_s * 1e3:g} ms for each further one"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("layout", no_wrap=True)
    for name in ("goodput 1/s", "in SLO", "refused", "split", "TTFT p90 s", "TPOT p90 ms", "hours"):
        table.add_column(name, justify="right")
    chosen = best(outcomes)
    for outcome in outcomes:
        table.add_row(*_cells(outcome), style="bold" if outcome is chosen else None)
    console.print(table)
    console.print(
        "layout: prefill:decode workers; hours: worker-hours for 1,000 requests within the SLO", style="dim"
    )
    console.print(
        f"Recommended: {chosen.scenario.mode}, {chosen.goodput:.2f} requests/s within the SLO "
        f"({chosen.attainment:.1%})\n  tandem serve {chosen.scenario.flags} "
        f"--slo-ttft {slo.ttft_s:g} --slo-tpot {slo.tpot_s:g}",
        highlight=False,
        soft_wrap=True,
    )


def print_drafts(console: Console, choices: Sequence[DraftChoice], method: str, chosen: PlanOutcome) -> None:
    """Print whether to speculate at the load of the chosen layout."""
    mean = max(round(chosen.mean_rows), 1)
    here = min(choices, key=lambda choice: abs(choice.rows - mean))
    end = last_paying(choices)
    if not end:
        text = f"no: with {method} it never pays"
    elif here.num_tokens:
        text = f"{method} with {here.num_tokens} tokens, {here.speedup:.2f} times as fast at {mean} requests"
    else:
        text = f"no: a worker decodes {mean} requests at once"
    console.print(f"Drafts: {text}", highlight=False, soft_wrap=True)
    if 0 < end < choices[-1].rows:
        console.print(f"  {method} pays up to {end} requests at once", highlight=False)
    elif end:
        console.print(f"  {method} pays at every load up to {end} requests at once", highlight=False)


def _cells(outcome: PlanOutcome) -> list[str]:
    return [
        _name(outcome.scenario),
        f"{outcome.goodput:.2f}",
        f"{outcome.attainment:.1%}",
        f"{outcome.refused / outcome.requests:.1%}",
        f"{outcome.split / outcome.requests:.0%}",
        f"{outcome.ttft.p90:.2f}",
        f"{outcome.tpot.p90 * 1e3:.1f}",
        f"{outcome.worker_hours:.2f}",
    ]


def _name(scenario: Scenario) -> str:
    if scenario.mode == "colocated":
        return f"colocated {scenario.decode}"
    return f"{scenario.mode} {scenario.prefill}:{scenario.decode}"


def plot(outcomes: Sequence[PlanOutcome], slo: Slo, path: Path) -> None:
    """Write an SVG file: a line for each mode over the number of prefill workers; colocated as a level."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (goodput, ttft, tpot) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for mode in ("disaggregated", "conditional"):
        line = sorted(
            (each for each in outcomes if each.scenario.mode == mode), key=lambda each: each.scenario.prefill
        )
        prefill = [each.scenario.prefill for each in line]
        goodput.plot(prefill, [each.goodput for each in line], "-o", label=mode)
        ttft.plot(prefill, [each.ttft.p90 for each in line], "-o", label=mode)
        tpot.plot(prefill, [each.tpot.p90 * 1e3 for each in line], "-o", label=mode)
    for each in outcomes:
        if each.scenario.mode == "colocated":
            levels = (goodput, each.goodput), (ttft, each.ttft.p90), (tpot, each.tpot.p90 * 1e3)
            for axes, level in levels:
                axes.axhline(level, color="grey", linestyle="--", label="colocated")
    _finish_plot(goodput, "requests/s within the SLO")
    _finish_plot(ttft, "time to first token, p90, s", slo.ttft_s)
    _finish_plot(tpot, "time per output token, p90, ms", slo.tpot_s * 1e3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _finish_plot(axes: Any, title: str, limit: float | None = None) -> None:
    if limit is not None:
        axes.axhline(limit, color="tab:red", linestyle=":", label="SLO")
    axes.set(xlabel="prefill workers", title=title, ylim=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
