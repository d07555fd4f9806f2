"""`tandem bench five-simulated`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.five.effects import name_of
from bench.five.experiment import Run, runs_of
from bench.five.factors import FACTORS, chosen, parse_factors
from bench.five.figures import Column, Finding, figures_of
from bench.five.fleet import FLEET_WORKLOADS, Fleet, SimulatedOutcome, choices_of, simulate_cell
from bench.five.report import plot, section
from bench.record import RESULTS, command_line, made_by, write_results
from planner.profile import DEFAULT_PROFILE, read_profile
from planner.scenarios import Slo
from protocol.errors import ConfigError

INTRODUCTION = """\
**Simulated: nothing here was measured.** {workers} workers of the profile `{profile}`, with figures from:

{sources}

Each technique is on or off in every combination. Goodput is the highest rate of requests of which
{attainment:.0%} had their first token within {ttft:g} s and the others within {tpot:g} s each; TTFT and TPOT
are medians at one low rate; the cost is that of a million output tokens at {price:g} per worker-hour. Effects
are ratios, as of `tandem bench five`; brackets are 95 % intervals, bold where they leave out 1."""


def five_simulated(
    workload: Annotated[str, typer.Option(help="comma-separated")] = ",".join(FLEET_WORKLOADS),
    factors: Annotated[str, typer.Option(help="comma-separated; the others are off")] = ",".join(FACTORS),
    profile: Annotated[str, typer.Option(help="bundled, or a file of tandem profile")] = DEFAULT_PROFILE,
    workers: Annotated[int, typer.Option(min=2, max=1024)] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="with other arrivals")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="that requests come in")] = 30.0,
    probes: Annotated[int, typer.Option(min=0, max=20, help="of the bisection")] = 3,
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="seconds to the first token")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(min=0.0001, help="seconds for each further token")] = 0.03,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="share within the SLO")] = 0.9,
    price: Annotated[float, typer.Option(min=1e-6, help="of a worker for an hour")] = 3.0,
    max_model_len: Annotated[int, typer.Option(min=16, help="what is reserved without paged KV")] = 16384,
    output: Annotated[Path, typer.Option(help="folder")] = RESULTS / "five-simulated",
) -> None:
    """The same experiment on a simulated fleet, from a profile: no server runs."""
    settings = dict(locals())
    console = Console()
    try:
        names, on = chosen(workload, list(FLEET_WORKLOADS), "--workload"), parse_factors(factors)
        known = read_profile(profile)
        fleet = Fleet(known, workers, max_model_len, Slo(slo_ttft, slo_tpot), attainment, seconds, probes)
        for name in names:
            _check(fleet, name)
        for run in runs_of(names, on, 1, seed=0):
            choices_of(fleet, run.cell)
    except (ConfigError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    outcomes = _simulate(fleet, runs_of(names, on, repeats, seed=0), console)
    try:
        findings = [_finding(fleet, name, on, outcomes, price) for name in names]
    except ValueError as error:
        console.print(f"[red]{error}[/red]: no rate meets the SLO there", highlight=False)
        raise typer.Exit(1) from error
    command = command_line("tandem bench five-simulated", five_simulated, settings)
    content = {"simulated": True, "fleet": fleet, "price": price, "outcomes": outcomes, "findings": findings}
    write_results(output, command, msgspec.to_builtins(content))
    text = _as_markdown(command, fleet, price, findings, outcomes)
    (output / "README.md").write_text(text)
    plot(findings, output / "effects.svg")
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)


def _check(fleet: Fleet, name: str) -> None:
    """Raises ValueError that names the option."""
    needed = FLEET_WORKLOADS[name].prompt + FLEET_WORKLOADS[name].output
    if needed > fleet.max_model_len:
        raise ValueError(
            f"--max-model-len: requests of {name} have {needed} tokens, got {fleet.max_model_len}"
        )


def _simulate(fleet: Fleet, runs: Sequence[Run], console: Console) -> list[SimulatedOutcome]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        return [
            simulate_cell(fleet, FLEET_WORKLOADS[run.workload], run.cell, run.repeat)
            for run in progress.track(runs, description="cells")
        ]


def _finding(
    fleet: Fleet, workload: str, factors: Sequence[str], outcomes: Sequence[SimulatedOutcome], price: float
) -> Finding:
    mine = [outcome for outcome in outcomes if outcome.workload == workload]
    columns: list[Column[SimulatedOutcome]] = [
        ("goodput", "requests/s", lambda outcome: outcome.goodput),
        ("TTFT", "s", lambda outcome: outcome.ttft_s),
        ("TPOT", "s", lambda outcome: outcome.tpot_s),
        ("cost", "a million tokens", lambda outcome: outcome.cost(fleet, price)),
    ]
    repeats = max(outcome.repeat for outcome in mine) + 1
    return Finding(workload, list(factors), repeats, figures_of(factors, mine, columns), [])


def _as_markdown(
    command: str,
    fleet: Fleet,
    price: float,
    findings: Sequence[Finding],
    outcomes: Sequence[SimulatedOutcome],
) -> str:
    sources = "\n".join(f"- {source}" for source in fleet.profile.sources)
    text = INTRODUCTION.format(
        workers=fleet.workers,
        profile=fleet.profile.name,
        sources=sources,
        attainment=fleet.attainment,
        ttft=fleet.slo.ttft_s,
        tpot=fleet.slo.tpot_s,
        price=price,
    )
    lines = [
        "# Five techniques on a simulated fleet",
        "",
        made_by(command),
        "",
        text,
        "",
        "![effects](effects.svg)",
    ]
    for finding in findings:
        lines += [
            "",
            *section(finding),
            "",
            "| on | requests/s | workers | drafted | TTFT, ms | TPOT, ms | cost |",
        ]
        lines += ["|---|--:|--:|--:|--:|--:|--:|"]
        mine = [each for each in outcomes if each.workload == finding.workload and each.repeat == 0]
        for outcome in sorted(mine, key=lambda each: (len(each.cell), each.cell)):
            lines.append(
                f"| {name_of(frozenset(outcome.cell))} | {outcome.goodput:.2f} | {outcome.layout} "
                f"| {outcome.drafted} | {outcome.ttft_s * 1e3:.1f} | {outcome.tpot_s * 1e3:.2f} "
                f"| {outcome.cost(fleet, price):.3g} |"
            )
    return "\n".join(lines) + "\n"
