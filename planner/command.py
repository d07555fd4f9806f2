"""`tandem plan`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from planner.drafts import draft_choices
from planner.profile import DEFAULT_PROFILE, read_profile
from planner.report import plot, print_drafts, print_plan
from planner.scenarios import PlanOutcome, Slo, Study, best, scenarios
from planner.trace import TraceFit, fitted, read_trace
from protocol.config import flag_name
from protocol.errors import ConfigError
from protocol.fields import FieldError, to_struct

_Seconds = Annotated[float, Meta(ge=1e-4, le=86400)]
_Factor = Annotated[float, Meta(ge=1e-6, le=1e6)]
_Count = Annotated[int, Meta(ge=1, le=2**31)]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options; field names are the flags."""

    trace: str
    slo_ttft: _Seconds
    slo_tpot: _Seconds
    workers: Annotated[int, Meta(ge=2, le=1024)]
    profile: str = DEFAULT_PROFILE
    trace_scale_lengths: _Factor = 1.0
    trace_speedup: _Factor = 1.0
    max_input_len: _Count | None = None
    max_output_len: _Count | None = None
    num_prompts: _Count | None = None
    output: str = "plan"


def parse(given: Mapping[str, str | None]) -> PlanOptions:
    """Parse the command line's text. Raises `ConfigError` that names the flag and its limits."""
    text = ("trace", "profile", "output")
    fields = {name: value if name in text else _number(value) for name, value in given.items()}
    try:
        return to_struct(fields, PlanOptions)
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
    outcomes = simulate(Study(profile, requests, fit.block_tokens, slo), options.workers, console)
    print_plan(console, outcomes, slo)
    chosen = best(outcomes)
    document: dict[str, object] = {
        "options": options,
        "profile": profile,
        "outcomes": outcomes,
        "recommended": chosen.scenario,
    }
    if profile.speculation is not None and profile.speculation.methods:
        choices = draft_choices(profile.speculation, BATCHES)
        print_drafts(console, choices, profile.speculation.methods[0].method, chosen)
        document["drafts"] = choices
    write(document, outcomes, slo, Path(options.output))
    console.print(f"Written: {options.output}/plan.svg, {options.output}/plan.json", highlight=False)


def simulate(study: Study, workers: int, console: Console) -> list[PlanOutcome]:
    """Return the outcomes in the order of the scenarios."""
    chosen = scenarios(workers)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for outcome in progress.track(study.outcomes(chosen), len(chosen), description="layouts"):
            found[outcome.scenario] = outcome
    return [found[scenario] for scenario in chosen]


def write(document: Mapping[str, object], outcomes: list[PlanOutcome], slo: Slo, folder: Path) -> None:
    try:
        plot(outcomes, slo, folder / "plan.svg")
        content = msgspec.json.format(msgspec.json.encode(document), indent=1)
        (folder / "plan.json").write_bytes(content + b"\n")
    except OSError as error:
        raise ConfigError(f"--output: cannot write to {folder}: {error.strerror}") from error


def _number(text: str | None) -> object:
    """Return the number; other text is returned unchanged, to be refused by the type check."""
    for kind in (int, float):
        try:
            return kind(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return text
