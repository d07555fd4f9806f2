"""`tandem bench speculate`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from bench.options import chosen, counts, parsed
from bench.report import RESULTS, publish, show
from bench.speculate.workload import WORKLOADS
from checkpoints.source import hf_source
from models.bundled import BUNDLED_MODEL
from protocol.errors import TandemError
from protocol.speculation import METHODS

if TYPE_CHECKING:
    from bench.speculate.engines import Engines
    from bench.speculate.measurement import CaseMeasurement
    from bench.speculate.plan import SpeculationPlan


def speculate(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}, or LABEL=JSON of a config; default: all that the model has"
        ),
    ] = None,
    num_tokens: Annotated[str, typer.Option(help="comma-separated: K, and auto")] = "0,1,2,3,5,8,auto",
    concurrency: Annotated[str, typer.Option(help="comma-separated")] = "1,4,16,64",
    temperature: Annotated[str, typer.Option(help="comma-separated")] = "0,0.7",
    workload: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(WORKLOADS)}")] = "completion",
    rounds: Annotated[int, typer.Option(min=1, help="that the medians are of")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="of a case, or as many as its concurrency")] = 8,
    output_len: Annotated[int, typer.Option(min=2, help="tokens to generate")] = 128,
    price: Annotated[float, typer.Option(min=0.0, help="of a worker for an hour")] = 1.0,
    model: Annotated[str, typer.Option(help="folder of the model")] = str(BUNDLED_MODEL),
    dtype: Annotated[str, typer.Option()] = "auto",
    compile: Annotated[str, typer.Option(help="auto, on, off")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="for the forward")] = os.cpu_count() or 1,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="KV pool of each engine")] = 256,
    output: Annotated[Path, typer.Option(help="folder for the tables and the JSON")] = RESULTS / "speculate",
) -> None:
    """Sweep method, K, concurrency and temperature on real text, against none in the same run."""
    settings: dict[str, Any] = dict(locals())
    logging.basicConfig(level="ERROR")
    import torch

    from bench.speculate.engines import Engines
    from bench.speculate.figures import figures_of, verdicts_of
    from bench.speculate.plan import SpeculationPlan, methods_of, parse_drafting, parse_num_tokens
    from bench.speculate.report import as_markdown
    from deploy.config import load_config

    torch.set_num_threads(threads)
    concurrencies = counts("--concurrency", concurrency)
    try:
        plan = SpeculationPlan(
            workloads=chosen("--workload", workload, WORKLOADS),
            temperatures=parsed("--temperature", temperature, float),
            concurrencies=concurrencies,
            num_tokens=parsed("--num-tokens", num_tokens, parse_num_tokens),
            draftings=[parse_drafting(spec, model) for spec in method or methods_of(model)],
            rounds=rounds,
            requests=requests,
            output_len=output_len,
        )
        flags: dict[str, Any] = {"model": model, "dtype": dtype, "compile": compile, "log_level": "error"}
        flags |= {"max_num_seqs": max(concurrencies), "kv_cache_memory_bytes": kv_cache_mib << 20}
        flags["speculative_config"] = {"method": "none"}
        engines = Engines(load_config(flags, environ={}), plan.draftings, output_len)
    except (TandemError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    try:
        measurements = measure(plan, engines, model)
    except RuntimeError as error:
        show(error)
        raise typer.Exit(1) from error
    finally:
        engines.close()
    settings["model"] = Path(model).name
    settings["target"] = f"engines in one process, {threads} threads, dtype {dtype}"
    figures = figures_of(measurements, price)
    verdicts = verdicts_of(figures)
    content = {
        "settings": settings,
        "verdicts": msgspec.to_builtins(verdicts, str_keys=True),
        "figures": msgspec.to_builtins(figures),
        "measurements": msgspec.to_builtins(measurements),
    }
    publish(output, content, as_markdown(settings, figures, verdicts))


def measure(plan: SpeculationPlan, engines: Engines, model: str) -> list[CaseMeasurement]:
    """Measure all rounds. Raises RuntimeError if a request fails."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from bench.speculate.workload import load_prompts

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(hf_source(model))
    prompts = {name: load_prompts(name, tokenizer, engines.max_prompt_len) for name in plan.workloads}
    measurements = []
    for drafting in plan.draftings:
        for number in range(-1, plan.rounds):  # an unmeasured round comes first, for compilation
            for block in plan.blocks(drafting):
                chosen = plan.chosen(prompts[block.workload], block.concurrency, number)
                for measurement in engines.run(plan.cases(block, number), number, chosen):
                    if number >= 0:
                        show(f"round {number}: {measurement}")
                        measurements.append(measurement)
    return measurements
