"""`tandem bench quantize`."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.options import counts
from bench.quantize.formats import HEAD, KV_FORMATS, PLAIN, ROUNDED, parse_checkpoints, parse_pairs
from bench.report import RESULTS, made_by, publish
from models.bundled import BUNDLED_MODEL, bundled_path, is_bundled_model

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
    output: Annotated[Path, typer.Option(help="folder for the table and the JSON")] = RESULTS / "quantize",
) -> None:
    """Time a model with weights and KV in each format, and measure the bundled one's predictions."""
    logging.basicConfig(level="ERROR")
    from bench.shapes.write import SHAPES, write_shape

    concurrencies = counts("--concurrency", concurrency, most=64)
    try:
        checkpoints = parse_checkpoints(checkpoint)
        pairs = parse_pairs(format, kv, checkpoints)
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

    from bench.quantize.compare import as_markdown, compare
    from bench.quantize.speed import SpeedLoad

    torch.set_num_threads(threads)
    disable_progress_bar()
    lengths = SpeedLoad(prompt_len, context, output_len, concurrencies, rounds)
    with tempfile.TemporaryDirectory() as made:
        if model is None:
            write_shape(shape, Path(made))
        rows = compare(pairs, checkpoints, Path(bundled_path(model) if model else made), lengths, texts)
    name = Path(model).name if model else shape
    qualities = {row.formats.name: row.quality for row in rows if row.quality is not None}
    content = {
        "shape": name,
        "threads": threads,
        "weight_bytes": {row.formats.name: row.weight_bytes for row in rows},
        "kv_token_bytes": {row.formats.name: row.kv_token_bytes for row in rows},
        "memory_bytes": {row.formats.name: row.memory for row in rows},
        "tokens_per_second": {row.formats.name: dataclasses.asdict(row.speed) for row in rows},
        "quality": {name: dataclasses.asdict(each) for name, each in qualities.items()},
    }
    text = as_markdown(f"{name}, {threads} threads", rows)
    publish(output, content, f"{text}\n{made_by()}\n")
