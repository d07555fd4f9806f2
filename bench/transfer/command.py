"""`tandem bench transfer`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.options import chosen
from bench.report import RESULTS, publish, show, terminal_table
from bench.transfer.row import TransferRow
from models.bundled import BUNDLED_MODEL

ROWS = {
    "shm": "raw",
    "tcp": "raw",
    "tls": "raw",
    "ucx": "nixl",
    "object_store": "object_store",
    "idle": "raw",
    "int8": "accuracy",
    "codec": "codec",
}
"""The module of each row's function: not every row needs NIXL, Ray or the engine."""


def measure(name: str, *arguments: int | str) -> Iterator[TransferRow]:
    function = getattr(importlib.import_module(f"bench.transfer.{ROWS[name]}"), name)
    yield from function(*arguments)


def transfer(
    rows: Annotated[str, typer.Option(help="comma-separated")] = ",".join(ROWS),
    repeats: Annotated[int, typer.Option(min=1, help="rounds that the medians are of")] = 5,
    model: Annotated[str, typer.Option(help="model whose KV the row `codec` takes")] = str(BUNDLED_MODEL),
    output: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS / "transfer",
) -> None:
    """Measure KV transfers against the machine's own limits, as ratios within the same run."""
    names = chosen("--rows", rows, list(ROWS))

    logging.basicConfig(level="ERROR")
    found, failed = [], False
    for name in names:
        try:
            for row in measure(name, repeats, *([model] if name == "codec" else [])):
                show(row)
                found.append(row)
        except (RuntimeError, ImportError) as error:
            failed = True
            show(f"{name}: {error}")
    table = terminal_table(
        "KV transfer; medians, baselines measured in the same run",
        ("what", "value", ""),
        [(row.what, f"{row.value:.3g}{row.unit}", row.verdict) for row in found],
    )
    publish(output, {"figures": msgspec.to_builtins(found)}, table)
    if failed:
        raise typer.Exit(1)
