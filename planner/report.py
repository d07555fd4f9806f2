"""Prints a plan."""

from __future__ import annotations

from collections.abc import Sequence

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
