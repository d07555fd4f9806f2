"""`tandem bench quantize-peers`: prefill and decode of one request against llama.cpp in each format."""

from __future__ import annotations

import logging
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.peers.llama_cpp import LlamaCpp
from bench.peers.setup import DEFAULT_ENV_DIR
from bench.quantize import speed
from bench.quantize.cells import PLAIN, Cell
from bench.record import RESULTS, write_results
from protocol.config import ServeConfig

TYPES = {PLAIN: "bf16", "int8": "q8_0", "int4": "q4_0"}
"""llama.cpp's type for each of our formats."""


def main(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="local folder, in bf16")],
    format: Annotated[str, typer.Option(help="comma-separated")] = ",".join(TYPES),
    prompt_len: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = 512,
    output_len: Annotated[int, typer.Option(min=2, help="tokens that are decoded")] = 32,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1, help="for each")] = os.cpu_count() or 1,
    env_dir: Annotated[Path, typer.Option(help="the peers' environments")] = DEFAULT_ENV_DIR,
    output: Annotated[Path, typer.Option(help="folder for the JSON")] = RESULTS / "quantize-llama",
) -> None:
    """Compare our engine with llama-bench in turns: one request each, no server."""
    logging.basicConfig(level="ERROR")
    formats = format.split(",")
    if unknown := set(formats) - set(TYPES):
        raise typer.BadParameter(f"--format: {min(unknown)!r} is not one of {', '.join(TYPES)}")
    llama = LlamaCpp(env_dir.expanduser().resolve() / "llama.cpp")
    try:
        llama.check_installed()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    torch.set_num_threads(threads)
    length = max(prompt_len, speed.PROMPT) + output_len
    config = ServeConfig(
        model=str(model),
        device="cpu",
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=length,
        kv_cache_memory_bytes=256 << 20,
    )
    engines = {each: speed.make_engine(Cell(each).applied(config, {}))[0] for each in formats}
    ggufs = {each: llama.gguf(model, TYPES[each]) for each in formats}
    measured: list[dict[str, Any]] = []
    for number in range(rounds):
        for each in formats:
            prefill, decode = llama.speed(ggufs[each], threads, prompt_len, output_len)
            ours = speed.measure({each: engines[each]}, [1], prompt_len, output_len, 1)[each]
            measured += [
                {"round": number, "format": TYPES[each], "system": "llama.cpp"}
                | {"prefill": prefill, "decode": decode},
                {"round": number, "format": each, "system": "tandem"}
                | {"prefill": ours.prefill, "decode": ours.decode[1]},
            ]
    Console().print(_table(formats, measured, f"{model.name}, {threads} threads, one request: tokens/s"))
    content = {
        "model": model.name,
        "threads": threads,
        "prompt_len": prompt_len,
        "output_len": output_len,
        "medians": {each: _medians(each, measured) for each in formats},
        "measurements": measured,
    }
    write_results(output, shlex.join(["python", "-m", "bench.quantize.peers", *sys.argv[1:]]), content)


def _medians(format: str, measured: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each phase the tokens/s of either engine, and the median of the rounds' ratios."""
    theirs = [m for m in measured if m["system"] == "llama.cpp" and m["format"] == TYPES[format]]
    ours = [m for m in measured if m["system"] == "tandem" and m["format"] == format]
    return {
        phase: {
            "tandem": statistics.median(m[phase] for m in ours),
            "llama.cpp": statistics.median(m[phase] for m in theirs),
            "ratio": statistics.median(a[phase] / b[phase] for a, b in zip(ours, theirs, strict=True)),
        }
        for phase in ("prefill", "decode")
    }


def _table(formats: Sequence[str], measured: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for column in ("format", "prefill", "llama.cpp", "ratio", "decode", "llama.cpp", "ratio"):
        table.add_column(column, justify="right")
    for format in formats:
        cells = [f"{format} / {TYPES[format]}"]
        for phase in _medians(format, measured).values():
            cells += [f"{phase['tandem']:.1f}", f"{phase['llama.cpp']:.1f}", f"{phase['ratio']:.2f}"]
        table.add_row(*cells)
    return table
