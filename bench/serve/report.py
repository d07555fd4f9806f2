"""A run's figures: a table for people, JSON for programs."""

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.report import show, terminal_table
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
    rows = []
    for name, label in _LATENCIES:
        distribution = getattr(summary, name)
        values = (distribution.mean, distribution.p50, distribution.p90, distribution.p99)
        rows.append((label, *(f"{value * 1e3:.2f}" for value in values)))
    rows.append(("requests/s", f"{summary.request_throughput:.2f}"))
    rows.append(("output tokens/s", f"{summary.output_throughput:.1f}"))
    rows.append(("input + output tokens/s", f"{summary.total_throughput:.1f}"))
    if summary.goodput is not None:
        rows.append(("goodput, requests/s", f"{summary.goodput:.2f}"))
    if summary.output_tokens:
        cost = result.client_cpu / summary.output_tokens * 1e6
        rows.append(("load generator's CPU, us/token", f"{cost:.0f}"))
    title = f"{summary.completed} requests in {summary.duration:.2f} s"
    return terminal_table(title, ("latency, ms", "mean", "p50", "p90", "p99"), rows)


def print_result(console: Console, result: RunResult) -> None:
    """Print the table, and each kind of error with one of its messages."""
    console.print(as_table(result))
    for kind, count in result.summary.errors.items():
        show(f"{count} x {kind}: {result.samples[kind]}")


def write_json(path: Path, result: RunResult, settings: dict[str, Any]) -> None:
    """Write the settings and the figures of a run; times in seconds."""
    document = {"settings": settings, **msgspec.to_builtins(result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, default=str) + "\n")
