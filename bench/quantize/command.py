"""`tandem bench quantize`."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bench.quantize.cells import HEAD, KV_FORMATS, PLAIN, ROUNDED, parse_cells, parse_checkpoints
from bench.record import RESULTS, command_line, made_by, write_results
from models.bundled import BUNDLED_MODEL, bundled_path, is_bundled_model

if TYPE_CHECKING:
    from bench.quantize.compare import Row

_WEIGHTS = ",".join([PLAIN, *ROUNDED])


def quantize(
    format: Annotated[
        str, typer.Option(help=f"of the weights, comma-separated: {_WEIGHTS}; with {HEAD}: the head, too")
    ] = _WEIGHTS,
    kv: Annotated[str, typer.Option(help=f"of the KV, comma-separated: {','.join(KV_FORMATS)}")] = PLAIN,
    checkpoint: Annotated[
        list[str], typer.Option(help="a quantized copy of --model, as in awq=folder; may be repeated")
    ] = [],  # noqa: B006
    concurrency: Annotated[str, typer.Option(help="comma-separated: requests at once")] = "1,4,16",
    shape: Annotated[str, typer.Option(help="random model to time: llama-29m, qwen3-0.5b")] = "qwen3-0.5b",
    model: Annotated[
        str | None, typer.Option(help="folder or bundled name of a model to time instead")
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="tokens of the prompt whose prefill is timed")] = 512,
    context: Annotated[int, typer.Option(min=1, help="tokens of the prompts whose decoding is timed")] = 16,
    output_len: Annotated[int, typer.Option(min=2, help="tokens that each request decodes")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="that the medians are of")] = 5,
    texts: Annotated[int, typer.Option(min=0, help="held-out texts to measure quality on; 0: none")] = 40,
    threads: Annotated[int, typer.Option(min=1, help="for the forward")] = os.cpu_count() or 1,
    output: Annotated[Path, typer.Option(help="folder for table, figure and JSON")] = RESULTS / "quantize",
) -> None:
    """Time a model with weights and KV in each format, and measure the bundled one's predictions."""
    settings: dict[str, Any] = dict(locals())
    logging.basicConfig(level="ERROR")
    from bench.shapes import SHAPES, write_shape

    try:
        checkpoints = parse_checkpoints(checkpoint)
        cells = parse_cells(format, kv, checkpoints)
        concurrencies = _numbers(concurrency)
        if model is None and shape not in SHAPES:
            raise ValueError(f"--shape: {shape!r} is not one of {', '.join(SHAPES)}")
        if checkpoints and texts and not is_bundled_model(bundled_path(model or shape)):
            raise ValueError(
                f"--checkpoint: held-out texts are for --model {BUNDLED_MODEL.name}; with another, --texts 0"
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    import torch
    from transformers.utils.logging import disable_progress_bar

    from bench.quantize.compare import SpeedLoad, compare

    torch.set_num_threads(threads)
    disable_progress_bar()
    load = SpeedLoad(prompt_len, context, output_len, concurrencies, rounds)
    with tempfile.TemporaryDirectory() as made:
        if model is None:
            write_shape(shape, Path(made))
        rows = compare(cells, checkpoints, Path(bundled_path(model) if model else made), load, texts)
    title = f"{Path(model).name if model else shape}, {threads} threads"
    _write(output, command_line("tandem bench quantize", quantize, settings), title, threads, rows)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--concurrency: {text!r} is not numbers with commas") from None
    if min(numbers) < 1 or max(numbers) > 64:
        raise ValueError(f"--concurrency: {text} is not within 1 to 64")
    return numbers


def _write(output: Path, command: str, title: str, threads: int, rows: list[Row]) -> None:
    from bench.quantize.report import as_markdown, plot

    qualities = {row.cell.name: row.quality for row in rows if row.quality is not None}
    write_results(
        output,
        command,
        {
            "shape": title.split(",")[0],
            "threads": threads,
            "weight_bytes": {row.cell.name: row.weight_bytes for row in rows},
            "kv_token_bytes": {row.cell.name: row.kv_token_bytes for row in rows},
            "memory_bytes": {row.cell.name: row.memory for row in rows},
            "tokens_per_second": {row.cell.name: dataclasses.asdict(row.speed) for row in rows},
            "quality": {name: dataclasses.asdict(each) for name, each in qualities.items()},
        },
    )
    plot(rows, output / "formats.svg")
    text = as_markdown(title, rows, "formats.svg")
    (output / "README.md").write_text(f"{text}\n{made_by(command)}\n")
    console = Console()
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
