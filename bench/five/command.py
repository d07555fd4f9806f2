"""`tandem bench five`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.five.experiment import Experiment, PlannedRun, runs_of
from bench.five.factors import FACTORS
from bench.five.measure import CellOutcome, CellServers, ExperimentSetting, Objective
from bench.five.workloads import WORKLOADS
from bench.options import chosen
from bench.report import RESULTS, publish, show
from models.bundled import BUNDLED_MODEL
from planner.profile import read_profile
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
    simulate: Annotated[
        str, typer.Option(help="simulate a fleet of this profile's workers, with texts four times as long")
    ] = "",
    seed: Annotated[int, typer.Option(help="of the order of the cells")] = 0,
    output: Annotated[Path, typer.Option(help="folder; what it has is not measured again")] = RESULTS
    / "five",
) -> None:
    """Measure the effects of disaggregation, speculation, paged KV, prefix sharing and quantization.

    Each cell of the factorial experiment is searched for its highest rate within the SLO. You may stop it at
    any time: the same command resumes with the missing cells. The tables show every workload whose cells are
    all in the folder.
    """
    from bench.five.figures import finding  # SciPy is in the extra `bench`
    from bench.five.report import as_markdown

    names, on = chosen("--workload", workload, list(WORKLOADS)), chosen("--factors", factors, FACTORS)
    objective = Objective(slo_ttft, slo_tpot, attainment)
    setting = ExperimentSetting(model, max_model_len, kv_mib, speculative_config, objective, seconds, probes)
    if simulate:
        no_server = {"kv_mib": 0, "speculative_config": "", "simulated": True}
        setting = msgspec.structs.replace(setting, model=simulate, **no_server)
    try:
        _check(setting, names)
        experiment = Experiment(output, setting)
        texts = [] if simulate else held_out(model)
    except (ConfigError, ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    failed = _measure(experiment, runs_of(names, on, repeats, seed), setting, texts)
    if failed:
        show(f"failed: {'; '.join(failed)}; run it again for these")
        raise typer.Exit(1)
    complete = {name: experiment.complete(name, on) for name in WORKLOADS}
    try:
        findings = [finding(setting, name, on, found, price) for name, found in complete.items() if found]
    except ValueError as error:
        show(error)
        raise typer.Exit(1) from error
    content = experiment.content() | {"price": price, "findings": msgspec.to_builtins(findings)}
    text = as_markdown(setting, price, findings, list(chain.from_iterable(complete.values())))
    publish(output, content, text)


def _check(setting: ExperimentSetting, workloads: Sequence[str]) -> None:
    """Raise ValueError or ConfigError that names the option if a setting or workload is invalid."""
    if setting.simulated:
        from bench.five.simulated import with_techniques  # imports torch

        with_techniques(read_profile(setting.model), frozenset(FACTORS), setting.max_model_len)
    else:
        if not Path(setting.model).is_dir():
            raise ValueError(f"--model: there is no folder {setting.model}")
        parse_speculative_config(setting.speculative_config, "--speculative-config")
    for name in workloads:
        needed = setting.traffic(name).prompt + setting.traffic(name).output
        if needed > setting.max_model_len:
            has = f"requests of {name} have {needed} tokens"
            raise ValueError(f"--max-model-len: {has}, got {setting.max_model_len}")


def held_out(model: str) -> list[list[int]]:
    """Return token ids of held-out code. Raises OSError if the model does not exist."""
    from transformers import AutoTokenizer

    from bench.speculate.workload import load_prompts

    prompts = load_prompts("completion", AutoTokenizer.from_pretrained(model), max_tokens=1 << 20)
    return [prompt.token_ids for prompt in prompts]


def _simulated(setting: ExperimentSetting) -> Callable[..., CellOutcome]:
    from bench.five.simulated import simulate_cell  # imports torch

    return partial(simulate_cell, setting)


def _measure(
    experiment: Experiment,
    runs: Sequence[PlannedRun],
    setting: ExperimentSetting,
    texts: Sequence[Sequence[int]],
) -> list[str]:
    """Measure the missing runs. Return the titles of the runs that failed."""
    failed = []
    with (
        tempfile.TemporaryDirectory() as logs,
        closing(CellServers(setting, texts, Path(logs))) as servers,
    ):
        measure = _simulated(setting) if setting.simulated else servers.measure

        def one(run: PlannedRun) -> CellOutcome:
            return measure(setting.traffic(run.workload), run.cell, run.repeat, experiment.near(run))

        missing = len(experiment.missing(runs))
        for number, (run, outcome) in enumerate(experiment.measure(runs, one), 1):
            if isinstance(outcome, RuntimeError):
                failed.append(run.title)
            show(f"{number} of {missing}: {run.title}: {outcome}")
    return failed
