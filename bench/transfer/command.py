"""`tandem bench transfer`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bench.record import RESULTS

if TYPE_CHECKING:
    from bench.transfer.figures import Figure

ROWS = ("shm", "tcp", "tls", "ucx", "object_store", "idle", "int8", "link")
DEFAULT_ROWS = ",".join(name for name in ROWS if name != "link")


def transfer(
    rows: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(ROWS)}, or all")] = DEFAULT_ROWS,
    repeats: Annotated[int, typer.Option(min=1, help="rounds that the medians are of")] = 5,
    output: Annotated[Path, typer.Option(help="folder for the results")] = RESULTS / "transfer",
) -> None:
    """Measure KV transfers against the machine's own limits, as ratios within the same run.

    `link` makes two hosts of network namespaces: it needs root, and iperf3.
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
