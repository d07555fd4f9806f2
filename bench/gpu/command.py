"""`tandem bench gpu`."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench.options import counts
from bench.report import RESULTS, publish, show

NO_GPU = 2
"""The exit status if there is no GPU to measure."""

_WORKING_BYTES = 4 << 30
"""Memory for the activations of a prompt's rows, in addition to weights and KV."""


def gpu(
    size: Annotated[str, typer.Option(help="of a Qwen3: 0.6B, 1.7B, 4B, 8B, 14B, 32B")] = "8B",
    batch: Annotated[str, typer.Option(help="requests that decode, comma-separated")] = "1,4,16,64",
    num_tokens: Annotated[str, typer.Option(help="drafted tokens, comma-separated")] = "1,2,4,8",
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="chance of a drafted token")] = 0.7,
    chunk: Annotated[str, typer.Option(help="tokens of a prompt, comma-separated")] = "512,2048,8192",
    context: Annotated[int, typer.Option(min=64, max=32768, help="tokens that decode rows see")] = 1024,
    long_context: Annotated[
        int, typer.Option(min=0, max=131072, help="tokens of one sequence beside the others, 0 for none")
    ] = 65536,
    budget: Annotated[int, typer.Option(min=16, help="tokens of a prompt in a step")] = 2048,
    output: Annotated[Path, typer.Option(help="folder for the tables and the JSON")] = RESULTS / "gpu",
) -> None:
    """Measure decoding, verification and prefill on this host's GPU against its roofline."""
    logging.basicConfig(level="ERROR")
    import torch

    from bench.gpu.measure import GpuPlan, measure
    from bench.gpu.model import SHAPES, MadeUpModel
    from bench.gpu.report import as_markdown, checks
    from bench.gpu.roofs import measured, missing, roofs_of

    if size not in SHAPES:
        raise typer.BadParameter(f"--size: {size!r} is none of {', '.join(SHAPES)}")
    plan = GpuPlan(
        batches=counts("--batch", batch, 1024),
        drafted=[0, *counts("--num-tokens", num_tokens, 63)],
        chunks=counts("--chunk", chunk, 32768),
        context=context,
        acceptance=acceptance,
        long_context=long_context,
        budget=budget,
    )
    if lack := missing():
        show(f"tandem bench gpu: {lack}")
        raise typer.Exit(NO_GPU)
    device = torch.device("cuda", torch.cuda.current_device())
    needed = SHAPES[size].nbytes(plan.num_tokens) + _WORKING_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    if needed > free:
        raise typer.BadParameter(
            f"--size, --batch and --context: they take {needed >> 30} GiB, and {free >> 30} GiB are free"
        )
    name = torch.cuda.get_device_name(device)
    reached = measured(name, device)
    roofs = roofs_of(name, reached)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        results = measure(MadeUpModel(SHAPES[size], device, Path(folder), plan.longest), plan)
    text = as_markdown(size, roofs, reached, plan, results)
    figures = {
        "roofs": asdict(roofs),
        "reached": asdict(reached),
        "plan": asdict(plan),
        "results": asdict(results),
        "checks": checks(results),
    }
    publish(output, figures, text)
