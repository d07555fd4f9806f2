"""`tandem bench five`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bench.five.experiment import Experiment, PlannedRun, runs_of
from bench.five.factors import FACTORS, chosen, parse_factors
from bench.five.figures import finding
from bench.five.measure import CellOutcome, ExperimentSetting, Objective, measure_cell
from bench.five.report import as_markdown, plot
from bench.five.workloads import WORKLOADS
from bench.record import RESULTS, command_line
from models.bundled import BUNDLED_MODEL
from protocol.errors import ConfigError
from protocol.speculation import parse_speculative_config


def five(
    workload: Annotated[str, typer.Option(help="comma-separated")] = ",".join(WORKLOADS),
    factors: Annotated[str, typer.Option(help="comma-separated; the others are off")] = ",".join(FACTORS),
    repeats: Annotated[int, typer.Option(min=1, help="of every cell; intervals are over them")] = 1,
    seconds: Annotated[float, typer.Option(min=0.5, help="that the requests of a probe come in")] = 3.0,
    probes: Annotated[int, typer.Option(min=0, max=20, help="of the bisection")] = 3,
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="seconds to the first token")] = 0.5,
    slo_tpot: Annotated[float, typer.Option(min=0.0001, help="seconds for each further token")] = 0.01,
    attainment: Annotated[float, typer.Option(min=0.01, max=1, help="share within the SLO")] = 0.9,
    price: Annotated[float, typer.Option(min=1e-6, help="of a worker for an hour")] = 1.0,
    model: Annotated[str, typer.Option(help="folder of the model")] = str(BUNDLED_MODEL),
    max_model_len: Annotated[int, typer.Option(min=16, help="what is reserved without paged KV")] = 1024,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV pool of each worker")] = 16,
    speculative_config: Annotated[str, typer.Option(help="JSON")] = '{"method": "ngram"}',
    seed: Annotated[int, typer.Option(help="of the order of the cells")] = 0,
    output: Annotated[Path, typer.Option(help="folder; what it has is not measured again")] = RESULTS
    / "five",
) -> None:
    """Measure the effects of disaggregation, speculation, paged KV, prefix sharing and quantization.

    Each cell of the factorial experiment starts a server and searches for its highest rate within the SLO.
    Stop it when you like: the same command goes on with the missing cells. The tables have every workload
    whose cells are all in the folder.
    """
    settings = dict(locals())
    console = Console()
    setting = ExperimentSetting(
        model=model,
        max_model_len=max_model_len,
        kv_mib=kv_mib,
        speculative_config=speculative_config,
        objective=Objective(slo_ttft, slo_tpot, attainment),
        seconds=seconds,
        probes=probes,
    )
    try:
        names, on = chosen(workload, list(WORKLOADS), "--workload"), parse_factors(factors)
        _check(setting, names)
        experiment = Experiment(output, setting)
        texts = held_out(model)
    except (ConfigError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    command = command_line("tandem bench five", five, settings)
    runs = runs_of(names, on, repeats, seed)
    failed = _measure(experiment, runs, setting, command, texts, console)
    if failed:
        console.print(f"[red]failed: {'; '.join(failed)}[/red]; run it again for these", highlight=False)
        raise typer.Exit(1)
    complete = {name: experiment.complete(name, on) for name in WORKLOADS}
    mine = list(chain.from_iterable(complete.values()))
    try:
        findings = [finding(name, on, found, price) for name, found in complete.items() if found]
    except ValueError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    experiment.write(command, {"price": price, "findings": msgspec.to_builtins(findings)})
    text = as_markdown(command, setting, price, findings, mine)
    (output / "README.md").write_text(text)
    plot(findings, output / "effects.svg")
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)


def _check(setting: ExperimentSetting, workloads: Sequence[str]) -> None:
    """Raise ValueError or ConfigError that names the option if a setting or workload is invalid."""
    if not Path(setting.model).is_dir():
        raise ValueError(f"--model: there is no folder {setting.model}")
    parse_speculative_config(setting.speculative_config, "--speculative-config")
    for name in workloads:
        needed = WORKLOADS[name].prompt + WORKLOADS[name].output
        if needed > setting.max_model_len:
            raise ValueError(
                f"--max-model-len: requests of {name} have {needed} tokens, got {setting.max_model_len}"
            )


def held_out(model: str) -> list[list[int]]:
    """Return token ids of held-out code. Raises OSError if the model does not exist."""
    from transformers import AutoTokenizer

    from bench.speculate.workload import load_prompts

    return load_prompts("completion", AutoTokenizer.from_pretrained(model), max_tokens=1 << 20)


def _measure(
    experiment: Experiment,
    runs: Sequence[PlannedRun],
    setting: ExperimentSetting,
    command: str,
    texts: Sequence[Sequence[int]],
    console: Console,
) -> list[str]:
    """Measure the missing runs. Return the titles of the runs that failed."""
    failed = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory() as logs,
        Progress(
            *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
        ) as progress,
    ):
        task = progress.add_task("cells", total=len(runs))
        progress.advance(task, len(runs) - len(experiment.missing(runs)))

        def one(run: PlannedRun) -> CellOutcome:
            progress.update(task, description=run.title)
            return measure_cell(
                setting, WORKLOADS[run.workload], run.cell, run.repeat, texts, Path(logs) / run.title
            )

        for run, outcome in experiment.measure(runs, command, one):
            progress.advance(task)
            if isinstance(outcome, RuntimeError):
                failed.append(run.title)
                console.print(f"[red]{run.title}[/red]: {outcome}", highlight=False, soft_wrap=True)
            else:
                console.print(_line(run, outcome), highlight=False, soft_wrap=True)
    return failed


def _line(run: PlannedRun, outcome: CellOutcome) -> str:
    found = f"{outcome.best.goodput:.1f} requests/s" if outcome.best is not None else "no rate"
    light = outcome.light
    return (
        f"{run.title}: {found} in {len(outcome.trials)} probes, "
        f"TTFT {light.ttft_s * 1e3:.1f} ms, TPOT {light.tpot_s * 1e3:.2f} ms"
    )
