"""`tandem bench speculate`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console

from bench.record import RESULTS, command_line, write_results
from models.bundled import BUNDLED_MODEL
from protocol.errors import TandemError
from protocol.speculation import METHODS

if TYPE_CHECKING:
    from bench.speculate.measurement import Measurement
    from bench.speculate.plan import Case, SpeculationPlan

T = TypeVar("T")


class MeasuredSystem(Protocol):
    """A measured system: engines in this process, or a server."""

    @property
    def max_prompt_len(self) -> int: ...

    def run(self, cases: Sequence[Case], number: int, prompts: Sequence[list[int]]) -> list[Measurement]: ...

    def close(self) -> None: ...


def speculate(
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(METHODS)}, or LABEL=JSON of a config; default: all"),
    ] = None,
    num_tokens: Annotated[str, typer.Option(help="comma-separated: K, and auto")] = "0,1,2,3,5,8,auto",
    concurrency: Annotated[str, typer.Option(help="comma-separated")] = "1,4,16,64",
    temperature: Annotated[str, typer.Option(help="comma-separated")] = "0,0.7",
    workload: Annotated[str, typer.Option(help="comma-separated: completion, edit")] = "completion",
    rounds: Annotated[int, typer.Option(min=1, help="that the medians are of")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="of a case, or as many as its concurrency")] = 8,
    output_len: Annotated[int, typer.Option(min=2, help="tokens to generate")] = 128,
    price: Annotated[float, typer.Option(min=0.0, help="of a worker for an hour")] = 1.0,
    model: Annotated[str, typer.Option(help="folder of the model; of its tokenizer, for a server")] = str(
        BUNDLED_MODEL
    ),
    dtype: Annotated[str, typer.Option()] = "auto",
    compile: Annotated[str, typer.Option(help="auto, on, off")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="for the forward")] = os.cpu_count() or 1,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="KV pool of each engine")] = 256,
    base_url: Annotated[str | None, typer.Option(help="measure this server instead of engines here")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="bearer token")] = None,
    output: Annotated[Path, typer.Option(help="folder for the tables, the plots and the JSON")] = RESULTS
    / "speculate",
) -> None:
    """Sweep method, K, concurrency and temperature on held-out code, against none in the same run."""
    settings: dict[str, Any] = {key: value for key, value in locals().items() if key != "api_key"}
    logging.basicConfig(level="ERROR")
    console = Console()
    from bench.speculate.plan import SpeculationPlan, parse_drafting, parse_num_tokens
    from bench.speculate.workload import WORKLOADS

    try:
        plan = SpeculationPlan(
            workloads=[_one_of(WORKLOADS, text) for text in _split(workload, str, "--workload")],
            temperatures=_split(temperature, float, "--temperature"),
            concurrencies=_split(concurrency, int, "--concurrency"),
            num_tokens=_split(num_tokens, parse_num_tokens, "--num-tokens"),
            draftings=[parse_drafting(spec, model) for spec in method or METHODS],
            rounds=rounds,
            requests=requests,
            output_len=output_len,
        )
        system = _server(plan, base_url, api_key) if base_url is not None else _engines(plan, settings)
    except (TandemError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        measurements = measure(plan, system, model, console)
    except RuntimeError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from error
    finally:
        system.close()
    command = command_line("tandem bench speculate", speculate, settings)
    settings["model"] = Path(model).name
    settings["target"] = base_url or f"engines in one process, {threads} threads, dtype {dtype}"
    _write(output, command, settings, measurements, console)


def _split(text: str, parse: Callable[[str], T], flag: str) -> list[T]:
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def _one_of(known: Sequence[T], value: object) -> T:
    for each in known:
        if each == value:
            return each
    raise ValueError(f"--workload: {value!r} is none of {', '.join(map(str, known))}")


def _engines(plan: SpeculationPlan, settings: dict[str, Any]) -> MeasuredSystem:
    import torch

    from bench.speculate.engines import Engines
    from deploy.config import load_config

    torch.set_num_threads(settings["threads"])
    flags = {key: settings[key] for key in ("model", "dtype", "compile")}
    flags |= {
        "max_num_seqs": max(plan.concurrencies),
        "kv_cache_memory_bytes": settings["kv_cache_mib"] << 20,
        "log_level": "error",
    }
    return Engines(load_config(flags, environ={}), plan.draftings, plan.output_len)


def _server(plan: SpeculationPlan, base_url: str, api_key: str | None) -> MeasuredSystem:
    from bench.speculate.server import SpeculatingServer

    for drafting in plan.draftings:
        if drafting.label != drafting.config.method:
            raise ValueError(f"--method {drafting.label}: a request names a method, not its options")
    methods = {drafting.label: drafting.config.method for drafting in plan.draftings}
    return SpeculatingServer(base_url, api_key, methods, plan.output_len)


def measure(plan: SpeculationPlan, system: MeasuredSystem, model: str, console: Console) -> list[Measurement]:
    """Measure all rounds. Raises RuntimeError if a request fails."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from bench.speculate.workload import load_prompts

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = {name: load_prompts(name, tokenizer, system.max_prompt_len) for name in plan.workloads}
    measurements = []
    for drafting in plan.draftings:
        for number in range(
            -1, plan.rounds
        ):  # one unmeasured round comes first, for compilation and adaptation
            for block in plan.blocks(drafting):
                chosen = plan.chosen(prompts[block.workload], block.concurrency, number)
                for measurement in system.run(plan.cases(block, number), number, chosen):
                    if number >= 0:
                        console.print(f"round {number}: {measurement}", highlight=False, soft_wrap=True)
                        measurements.append(measurement)
    return measurements


def _write(
    folder: Path,
    command: str,
    settings: dict[str, Any],
    measurements: Sequence[Measurement],
    console: Console,
) -> None:
    from bench.speculate.figures import figures_of, verdicts_of
    from bench.speculate.plots import plot_over_concurrency, plot_over_k
    from bench.speculate.report import as_markdown, contents

    figures = figures_of(measurements, settings["price"])
    verdicts = verdicts_of(figures)
    write_results(folder, command, contents(settings, measurements, figures, verdicts))
    tables = as_markdown(command, settings, figures, verdicts)
    (folder / "README.md").write_text(tables)
    plot_over_k(figures, folder / "over-k.svg")
    plot_over_concurrency(figures, folder / "over-concurrency.svg")
    console.print(tables, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {folder}", highlight=False, soft_wrap=True)
