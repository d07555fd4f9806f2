"""`tandem status`: shows the workers, their roles and their load, once or live."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.client import checked, client
from protocol.metrics import REPORTED, reported

_FILE_WIDTH = 200
_WRAPPED_WIDTH = 16
_GAP = 2


def output_console() -> Console:
    """Return a console on standard output. A pipe or a file has no width, so it gets all columns."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else _FILE_WIDTH)


class FittedTable:
    """A table with `columns`. Those in `optional` are left out, first to last, until the rest fits.

    The `wrapped` column takes several lines if its text is long.
    """

    def __init__(
        self, *columns: str, optional: Sequence[str] = (), wrapped: str = "", title: str | None = None
    ) -> None:
        self._columns, self._optional, self._wrapped, self._title = columns, optional, wrapped, title
        self._rows: list[Sequence[str | Text]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(range(len(self._columns)))
        for name in self._optional:
            if sum(map(self._width, kept)) + _GAP * (len(kept) - 1) <= options.max_width:
                break
            kept.remove(self._columns.index(name))
        table = Table(
            title=self._title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
        )
        for name in (self._columns[index] for index in kept):
            table.add_column(name, no_wrap=name != self._wrapped, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        yield ""
        yield table

    def _width(self, index: int) -> int:
        name = self._columns[index]
        if name == self._wrapped:
            return _WRAPPED_WIDTH
        texts = [name, *(str(row[index]) for row in self._rows)]
        return max(map(cell_len, texts))


_COLUMNS = ("worker", "role", "state", "run", "wait", "KV used", "cached", "hits", "transports")
_COUNTERS = {
    metric.name: metric
    for metric in REPORTED
    if metric.name.startswith("spec_decode_num_") and metric.labels == ("method",)
}
_SPECULATION_COLUMNS = ("worker", "method", "drafts", "accepted", "tau", "K now")


def show_status(url: str, api_key: str | None, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Print the workers, live until Ctrl-C, or once. Raises `ServerError`."""
    with contextlib.suppress(KeyboardInterrupt), client(url, api_key) as http:
        if as_json:
            print(json.dumps(_fetch(http), indent=2))
        elif once or not sys.stdout.isatty():
            output_console().print(make_view(url, _fetch(http)))
        else:
            _live(http, url, interval_s)


def _fetch(http: httpx.Client) -> dict[str, Any]:
    status: dict[str, Any] = checked(http.get("/workers")).json()
    return status


def _live(http: httpx.Client, url: str, interval_s: float) -> None:
    with Live(make_view(url, _fetch(http)), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(make_view(url, _fetch(http)), refresh=True)


def make_view(url: str, status: dict[str, Any]) -> Group:
    """Return the table of workers, and that of speculation if there is any."""
    speculation = make_speculation_table(status)
    return Group(make_table(url, status), *([speculation] if speculation.row_count else []))


def make_table(url: str, status: dict[str, Any]) -> FittedTable:
    """Return one row for each worker that the router knows, and for each that is being started."""
    table = FittedTable(*_COLUMNS, optional=("role", "cached"), wrapped="transports", title=url)
    for worker in status["workers"]:
        table.add_row(*_row(worker))
    for worker in status.get("awaited", ()):
        table.add_row(worker["id"], worker["role"], "awaited", *["-"] * (len(_COLUMNS) - 3))
    return table


def _row(worker: dict[str, Any]) -> list[str]:
    total = max(1, worker["total_blocks"])
    queried = worker["prefix_query_tokens"]
    return [
        worker["id"],
        worker["role"],
        worker["lifecycle"],
        str(worker["num_running"]),
        str(worker["num_waiting"]),
        f"{worker['kv_usage']:.0%} of {worker['total_blocks']}",
        f"{worker['cached_blocks'] / total:.0%}",
        f"{worker['prefix_hit_tokens'] / queried:.0%}" if queried else "-",
        _transports(worker) or "-",
    ]


def _transports(worker: dict[str, Any]) -> str:
    """Return the transport to each peer, and why better transports do not work for the pair."""
    refused: dict[str, list[str]] = {}
    for pair in worker["pairs"]:
        if "refused" in pair:
            refused.setdefault(pair["peer"], []).append(f"{pair['transport']}: {pair['reason']}")
    told = []
    for peer, name in worker["transports"].items():
        reasons = "; ".join(refused.get(peer, []) + refused.get("", []))
        told.append(f"{peer}: {name}" + (f" ({reasons})" if reasons else ""))
    return ", ".join(told)


def make_speculation_table(status: dict[str, Any]) -> FittedTable:
    """Return one row for each worker and method that has drafted or is configured to."""
    table = FittedTable(*_SPECULATION_COLUMNS)
    for worker in status["workers"]:
        totals = spec_decode_totals(worker["counters"])
        deployed = worker["start_up"].get("speculation", "none").partition(" (")[0]
        if deployed != "none":
            totals.setdefault(deployed, {})
        for method, total in totals.items():
            table.add_row(worker["id"], method, *_brought(total), _current_k(worker, method))
    return table


def spec_decode_totals(counters: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the counters `spec_decode_num_NAME_total` of each method, by NAME."""
    totals: dict[str, dict[str, float]] = defaultdict(dict)
    for key, value in counters.items():
        found = reported(key, _COUNTERS)
        if found is not None:
            metric, (method,) = found
            totals[method][metric.name.removeprefix("spec_decode_num_").removesuffix("_total")] = value
    return totals


def _brought(total: dict[str, float]) -> list[str]:
    drafts, drafted = total.get("drafts", 0), total.get("draft_tokens", 0)
    accepted = total.get("accepted_tokens", 0)
    return [
        f"{drafts:.0f}",
        f"{accepted / drafted:.0%}" if drafted else "-",
        f"{1 + accepted / drafts:.2f}" if drafts else "-",
    ]


def _current_k(worker: dict[str, Any], method: str) -> str:
    """Return the average number of tokens that its requests shall draft in a step."""
    for state in (worker.get("speculation") or {}).get("methods", ()):
        if state["method"] == method and state.get("num_requests"):
            return f"{state.get('num_tokens', 0) / state['num_requests']:.1f}"
    return "-"
