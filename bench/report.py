"""Tables, and folders of results with the machine, the commit and the command that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "bench" / "results"

_EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""CPU extensions that matrix products depend on."""


def machine() -> dict[str, Any]:
    """Describe the machine that the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    extensions = set(fields.get("flags", "").split()).intersection(_EXTENSIONS)
    return " ".join([fields.get("model name", platform.processor()), *sorted(extensions)])


def commit() -> str:
    """Return the checkout's commit, with "+" appended if files differ from it; "unknown" outside of a
    checkout.
    """
    git = ["git", "-C", str(REPO), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command() -> str:
    """Return the command that this process runs, as one types it."""
    arguments = sys.argv[1:]
    return shlex.join(["tandem", "bench", *arguments[arguments[:1] == ["bench"] :]])


def made_by() -> str:
    """Return a sentence for reports on how results were made."""
    host = machine()
    return (
        f"Made by `{command()}`\nat {commit()}, on {host['cores']} cores of {host['cpu']}, "
        f"Linux {host['kernel']}, Python {host['python']}."
    )


def write_results(folder: Path, content: dict[str, Any]) -> None:
    """Write `results.json` into `folder`, which is created. Times are in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"command": command(), "commit": commit(), "machine": machine()} | content
    (folder / "results.json").write_text(json.dumps(document, indent=1, default=str) + "\n")


def show(text: object) -> None:
    """Print a line or a report unchanged."""
    Console().print(str(text), highlight=False, markup=False, soft_wrap=True)


def publish(folder: Path, content: dict[str, Any], report: str | Table) -> None:
    """Print the report, and write it (`README.md`, if it is text) and the content into `folder`.

    Neither a folder that cannot be written nor a terminal that is gone costs the measurement.
    """
    try:
        if isinstance(report, str):
            show(report)
        else:
            Console(width=None if sys.stdout.isatty() else 120).print(report)  # no cell is cut in a file
    finally:
        write_results(folder, content)
        if isinstance(report, str):
            (folder / "README.md").write_text(report)
    show(f"written to {folder}")


def terminal_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose first column is aligned left and whose other columns are aligned right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(head):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> str:
    """Return a table in Markdown. The first `texts` columns are aligned left, the others right."""
    rule = ["---" if number < texts else "--:" for number in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *rows))
