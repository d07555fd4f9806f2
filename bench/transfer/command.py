"""`tandem bench transfer` and `tandem bench transfer-growth`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bench.record import RESULTS

if TYPE_CHECKING:
    from bench.transfer.figures import Figure
    from bench.transfer.growth import Point

ROWS = ("shm", "tcp", "tls", "ucx", "object_store", "messages", "idle", "int8", "link", "delay")
DEFAULT_ROWS = ",".join(name for name in ROWS if name not in ("link", "delay"))


def transfer(
    rows: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(ROWS)}, or all")] = DEFAULT_ROWS,
    repeats: Annotated[int, typer.Option(min=1, help="rounds that the medians are of")] = 5,
    output: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS / "transfer",
) -> None:
    """Measure KV transfers against what the machine can do, in ratios taken in the same run.

    `link` makes two hosts of network namespaces: it needs root, and iperf3. `delay` prefills prompts of 4096
    tokens with the shape of a 0.6B model: minutes for each round.
    """
    from bench.transfer.figures import as_table, write_figures
    from bench.transfer.rows import MEASURES

    chosen = list(ROWS) if rows == "all" else [name.strip() for name in rows.split(",")]
    unknown = [name for name in chosen if name not in ROWS]
    if unknown:
        raise typer.BadParameter(f"--rows: {', '.join(unknown)} is none of all, {', '.join(ROWS)}")
    logging.basicConfig(level="ERROR")
    console = Console()
    figures: list[Figure] = []
    failed = False
    for name in chosen:
        try:
            for figure in MEASURES[name](repeats):
                console.print(str(figure), highlight=False, soft_wrap=True)
                figures.append(figure)
        except (RuntimeError, ImportError) as error:
            failed = True
            console.print(f"[red]{name}[/red]: {error}", highlight=False, soft_wrap=True)
    console.print(as_table(figures))
    write_figures(output, f"tandem bench transfer --rows {','.join(chosen)} --repeats {repeats}", figures)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def transfer_growth(
    repeats: Annotated[int, typer.Option(min=1, help="transfers that the medians are of")] = 5,
    output: Annotated[Path, typer.Option(help="folder for the tables, the plot and the JSON")] = RESULTS
    / "transfer-growth",
) -> None:
    """Measure how bytes, extents and time grow with the prompt, and with pairs at the same time.

    Takes up to 8 GiB of memory.
    """
    from bench.transfer import growth

    logging.basicConfig(level="ERROR")
    console = Console()

    def shown(points: Iterable[Point]) -> list[Point]:
        collected = []
        for point in points:
            console.print(growth.describe(point), highlight=False, soft_wrap=True)
            collected.append(point)
        return collected

    command = f"tandem bench transfer-growth --repeats {repeats}"
    growth.write(output, shown(growth.by_prompt(repeats)), shown(growth.by_pairs(repeats)), command)
    console.print(f"written to {output}", highlight=False, soft_wrap=True)
