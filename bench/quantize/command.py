"""`tandem bench quantize`."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.record import RESULTS, write_results

FORMATS = "bf16,int8,int4,fp8,mxfp4"


def quantize(
    format: Annotated[str, typer.Option(help=f"comma-separated, of {FORMATS}")] = FORMATS,
    concurrency: Annotated[str, typer.Option(help="comma-separated: requests at once")] = "1,4,16",
    shape: Annotated[str, typer.Option(help="random model to time: llama-29m, qwen3-0.5b")] = "qwen3-0.5b",
    model: Annotated[Path | None, typer.Option(help="folder of a model to time instead")] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="tokens of the prompt whose prefill is timed")] = 512,
    output_len: Annotated[int, typer.Option(min=2, help="tokens that each request decodes")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="that the medians are of")] = 5,
    texts: Annotated[int, typer.Option(min=0, help="held-out texts to measure quality on; 0: none")] = 40,
    threads: Annotated[int, typer.Option(min=1, help="for the forward")] = os.cpu_count() or 1,
    output: Annotated[Path, typer.Option(help="folder for the JSON")] = RESULTS / "quantize",
) -> None:
    """Time a model with its weights rounded to each format, and measure the bundled one's predictions."""
    logging.basicConfig(level="ERROR")
    formats = format.split(",")
    unknown = set(formats) - set(FORMATS.split(","))
    if unknown:
        raise typer.BadParameter(f"--format: {min(unknown)!r} is not one of {FORMATS}")
    try:
        concurrencies = [int(each) for each in concurrency.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--concurrency: {concurrency!r} is not numbers with commas") from None
    if min(concurrencies) < 1 or max(concurrencies) > 64:
        raise typer.BadParameter(f"--concurrency: {concurrency} is not within 1 to 64")
    import torch
    from transformers.utils.logging import disable_progress_bar

    from bench.quantize import quality, speed
    from bench.shapes import SHAPES, write_shape
    from protocol.config import ServeConfig

    if model is None and shape not in SHAPES:
        raise typer.BadParameter(f"--shape: {shape!r} is not one of {', '.join(SHAPES)}")
    torch.set_num_threads(threads)
    disable_progress_bar()
    if speed.PLAIN not in formats:
        formats.insert(0, speed.PLAIN)  # what the others are compared with
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            write_shape(shape, Path(folder))
        config = ServeConfig(
            model=str(model or folder),
            device="cpu",
            dtype="bfloat16",
            max_model_len=prompt_len + output_len + 16,
            kv_cache_memory_bytes=1 << 30,
        )
        made = {each: speed.make_engine(config, each) for each in formats}
    engines = {name: engine for name, (engine, _) in made.items()}
    speeds = speed.measure(engines, concurrencies, prompt_len, output_len, rounds)
    qualities = quality.measure(formats, quality.held_out(texts)) if texts else {}
    console = Console()
    plain = speeds[speed.PLAIN]
    table = Table(title=f"{model or shape}, {threads} threads: tokens/s, and times {speed.PLAIN}")
    for column in ("format", "MB", "prefill", *(f"decode, {each}" for each in concurrencies)):
        table.add_column(column, justify="right")
    for name, found in speeds.items():
        rates = [(found.prefill, plain.prefill)] + [(found.decode[c], plain.decode[c]) for c in concurrencies]
        cells = [f"{rate:.1f} ({rate / base:.2f})" for rate, base in rates]
        table.add_row(name, f"{made[name][1] / 1e6:.1f}", *cells)
    console.print(table)
    if qualities:
        table = Table(title=f"the bundled model's predictions of {texts} held-out texts")
        for column in ("format", "bits per byte", "KL to bf16, nats", "same next token"):
            table.add_column(column, justify="right")
        for name, each in qualities.items():
            table.add_row(
                name, f"{each.bits_per_byte:.4f}", f"{each.divergence:.5f}", f"{each.agreement:.4f}"
            )
        console.print(table)
    write_results(
        output,
        shlex.join(["tandem", *sys.argv[1:]]),
        {
            "shape": str(model or shape),
            "threads": threads,
            "weight_bytes": {name: num_bytes for name, (_, num_bytes) in made.items()},
            "tokens_per_second": {name: dataclasses.asdict(each) for name, each in speeds.items()},
            "quality": {name: dataclasses.asdict(each) for name, each in qualities.items()},
        },
    )
