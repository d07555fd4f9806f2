"""Shows a run's figures: a table for people, JSON for programs, a progress bar during the run."""

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.serve.client import Record
from bench.serve.runner import RunResult

_LATENCIES = (
    ("ttft", "time to first token"),
    ("itl", "inter-token latency"),
    ("tpot", "time per output token"),
    ("e2el", "end to end"),
)


def as_table(result: RunResult) -> Table:
    """Return a table with a row for each latency in milliseconds, then throughput and errors."""
    summary = result.summary
    table = Table(title=f"{summary.completed} requests in {summary.duration:.2f} s", title_justify="left")
    for column in ("latency, ms", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="left" if column.startswith("latency") else "right")
    for name, label in _LATENCIES:
        distribution = getattr(summary, name)
        values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
        table.add_row(label, *(f"{value * 1e3:.2f}" for value in values))
    table.add_section()
    table.add_row("requests/s", f"{summary.request_throughput:.2f}")
    table.add_row("output tokens/s", f"{summary.output_throughput:.1f}")
    table.add_row("input + output tokens/s", f"{summary.total_throughput:.1f}")
    if summary.goodput is not None:
        table.add_row("goodput, requests/s", f"{summary.goodput:.2f}")
    if summary.output_tokens:
        cost = result.client_cpu / summary.output_tokens * 1e6
        table.add_row("load generator's CPU, us/token", f"{cost:.0f}")
    return table


def print_result(console: Console, result: RunResult) -> None:
    """Print the table, and each kind of error with one of its messages."""
    console.print(as_table(result))
    for kind, count in result.summary.errors.items():
        console.print(f"[red]{count} x {kind}[/red]: {result.samples[kind]}", highlight=False)


def write_json(path: Path, result: RunResult, settings: dict[str, Any]) -> None:
    """Write the settings and the figures of a run; times in seconds."""
    document = {"settings": settings, **msgspec.to_builtins(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")


class ProgressBar:
    """Counts finished requests on a terminal. Draws rarely, because it shares the cores with the server."""

    def __init__(self, console: Console, total: int, enabled: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[failed]} failed"),
            console=console,
            refresh_per_second=2,
            disable=not enabled or not console.is_terminal,
        )
        self._task = self._progress.add_task("requests", total=total, failed=0)
        self._failed = 0

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def on_done(self, record: Record) -> None:
        self._failed += bool(record.error)
        self._progress.update(self._task, advance=1, failed=self._failed)
