"""`tandem plan`: simulates every layout, then prints, plots and writes the outcomes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from costs.drafting import MIN_GAIN, StepCurve, local_rate, plain_rate
from planner.profile import read_profile
from planner.scenarios import PlanOutcome, Scenario, Slo, Study, best, scenarios
from planner.trace import TraceFit, fitted, read_trace
from protocol.config import flag_name
from protocol.errors import ConfigError
from protocol.fields import FieldError, to_struct
from protocol.speculation import MethodState, SpeculationState

_Seconds = Annotated[float, Meta(ge=1e-4, le=86400)]
_Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
_Count = Annotated[int, Meta(ge=1, le=2**31)]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `tandem plan`. Field names are the flags."""

    trace: str
    slo_ttft: _Seconds
    slo_tpot: _Seconds
    workers: Annotated[int, Meta(ge=2, le=1024)]
    profile: str
    trace_scale_lengths: _Factor
    trace_speedup: _Factor
    max_input_len: _Count | None = None
    max_output_len: _Count | None = None
    num_prompts: _Count | None = None
    output: str


def parse(flags: Mapping[str, object]) -> PlanOptions:
    """Check the command line's values. Raises `ConfigError` that names the flag and its limits."""
    try:
        return to_struct(flags, PlanOptions)
    except FieldError as error:
        raise ConfigError(f"{flag_name(error.field)}: {error.message}") from error


def plan(options: PlanOptions, console: Console) -> None:
    """Simulate every layout, print its outcome, and write `plan.json` and `plan.svg`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plan needs the package matplotlib: pip install 'tandem-serve[bench]'")
    profile, slo = read_profile(options.profile), Slo(options.slo_ttft, options.slo_tpot)
    fit = TraceFit(
        options.trace_scale_lengths, options.max_input_len, options.max_output_len, options.trace_speedup
    )
    requests = fitted(read_trace(Path(options.trace), options.num_prompts), fit)
    folder = _made(Path(options.output))
    outcomes = _simulate(Study(profile, requests, fit.block_tokens, slo), options.workers, console)
    chosen = best(outcomes)
    document: dict[str, object] = {"options": options, "profile": profile, "outcomes": outcomes}
    document["recommended"] = chosen.scenario
    drafts = profile.speculation if profile.speculation and profile.speculation.methods else None
    choices = draft_choices(drafts, BATCHES) if drafts else []
    if drafts:
        document["drafts"] = choices
    try:
        _print_plan(console, outcomes, slo)
        if drafts:
            _print_drafts(console, choices, drafts.methods[0].method, chosen)
    finally:  # a reader that has seen enough, or a full disk, costs no figure
        _write(document, outcomes, slo, folder)
    console.print(f"Written: {options.output}/plan.svg, {options.output}/plan.json", highlight=False)


def _made(folder: Path) -> Path:
    """Make the output's folder before the simulation, which may take minutes. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: cannot write to {folder}: {error.strerror}") from error
    return folder


def _simulate(study: Study, workers: int, console: Console) -> list[PlanOutcome]:
    """Return the outcomes in the order of the scenarios."""
    chosen = scenarios(workers)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for outcome in progress.track(study.outcomes(chosen), len(chosen), description="layouts"):
            found[outcome.scenario] = outcome
    return [found[scenario] for scenario in chosen]


def _write(document: Mapping[str, object], outcomes: list[PlanOutcome], slo: Slo, folder: Path) -> None:
    try:
        _plot(outcomes, slo, folder / "plan.svg")
        content = msgspec.json.format(msgspec.json.encode(document), indent=1)
        (folder / "plan.json").write_bytes(content + b"\n")
    except OSError as error:
        raise ConfigError(f"--output: cannot write to {folder}: {error.strerror}") from error


def _print_plan(console: Console, outcomes: Sequence[PlanOutcome], slo: Slo) -> None:
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


def _print_drafts(console: Console, choices: Sequence[DraftChoice], method: str, chosen: PlanOutcome) -> None:
    """Print whether speculation pays at the load of the chosen layout."""
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


def _plot(outcomes: Sequence[PlanOutcome], slo: Slo, path: Path) -> None:
    """Write an SVG file with a line per mode over the number of prefill workers; colocated is level."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (goodput, ttft, tpot) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for mode in ("disaggregated", "conditional"):
        of_mode = [each for each in outcomes if each.scenario.mode == mode]
        line = sorted(of_mode, key=lambda each: each.scenario.prefill)
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
    figure.savefig(path)
    pyplot.close(figure)


def _finish_plot(axes: Any, title: str, limit: float | None = None) -> None:
    if limit is not None:
        axes.axhline(limit, color="tab:red", linestyle=":", label="SLO")
    axes.set(xlabel="prefill workers", title=title, ylim=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


class DraftChoice(msgspec.Struct, frozen=True):
    """The best number of draft tokens for batches of `rows` requests, 0 for none, and its speedup."""

    rows: int
    num_tokens: int
    speedup: float


def draft_choices(known: SpeculationState, rows: Sequence[int]) -> list[DraftChoice]:
    return [_choice(known, known.methods[0], each) for each in rows]


def last_paying(choices: Sequence[DraftChoice]) -> int:
    """Return the largest batch for which drafting pays; 0 if it never does."""
    return max((choice.rows for choice in choices if choice.num_tokens), default=0)


def _choice(known: SpeculationState, method: MethodState, rows: int) -> DraftChoice:
    curve = StepCurve(rows, known.step_time)
    chances = list(accumulate(method.acceptance, mul))
    plain = plain_rate(rows, curve).tokens_per_s
    counts = range(1, min(known.max_tokens, len(chances)) + 1)
    rates = {each: local_rate(rows, curve, method, chances[:each], each, levels=each) for each in counts}
    speedups = {count: rate.tokens_per_s / plain for count, rate in rates.items()}
    best = max(speedups, key=speedups.__getitem__)
    return DraftChoice(rows, best if speedups[best] >= 1 + MIN_GAIN else 0, speedups[best])
