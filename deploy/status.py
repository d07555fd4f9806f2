"""`tandem status` and `tandem top`: show the workers, their load and their rates, once or live."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.client import client, fields_of
from protocol.metrics import REPORTED, reported

_FILE_WIDTH = 200
_WRAPPED_WIDTH = 16
_GAP = 2


def output_console() -> Console:
    """Return a console on standard output. A pipe or a file has no width, so it gets all columns."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else _FILE_WIDTH)


class FittedTable:
    """A table with `columns`. Columns in `optional` are left out, first to last, until the others fit.

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
        table = Table(title=self._title, title_justify="left", box=None, pad_edge=False)
        table.padding = (0, _GAP, 0, 0)
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
_NUMBERS = "spec_decode_num_"
_BY_METHOD = [metric for metric in REPORTED if metric.labels == ("method",)]
_COUNTERS = {metric.name: metric for metric in _BY_METHOD if metric.name.startswith(_NUMBERS)}
_SPECULATION_COLUMNS = ("worker", "method", "drafts", "accepted", "tau", "K now")


def show_status(url: str, api_key: str | None, *, once: bool, as_json: bool, interval_s: float) -> None:
    """Print the workers, live until Ctrl-C, or once. Raises `ServerError`."""
    with contextlib.suppress(KeyboardInterrupt), client(url, api_key) as http:

        def fetch() -> dict[str, Any]:
            return fields_of(http.get("/workers"), "workers")

        if as_json:
            print(json.dumps(fetch(), indent=2))
        else:
            _show(lambda: make_view(url, fetch()), once, interval_s, screen=False)


def _show(view: Callable[[], RenderableType], once: bool, interval_s: float, *, screen: bool) -> None:
    """Print a view once, or show it anew after each interval."""
    if once or not sys.stdout.isatty():
        output_console().print(view())
        return
    with Live(view(), auto_refresh=False, screen=screen) as live:
        while True:
            time.sleep(interval_s)
            live.update(view(), refresh=True)


def make_view(url: str, status: dict[str, Any]) -> Group:
    """Return the table of workers, and the table of speculation if any worker drafts."""
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
    return [
        worker["id"],
        worker["role"],
        worker["lifecycle"],
        str(worker["num_running"]),
        str(worker["num_waiting"]),
        f"{worker['kv_usage']:.0%} of {worker['total_blocks']}",
        f"{worker['cached_blocks'] / total:.0%}",
        _share(worker["prefix_hit_tokens"], worker["prefix_query_tokens"]),
        _transports(worker) or "-",
    ]


def _transports(worker: dict[str, Any]) -> str:
    """Return the transport to each peer, and why better transports do not work for the pair."""
    refused: dict[str, list[str]] = {}
    for pair in worker["pairs"]:
        if "refused" in pair:
            refused.setdefault(pair["peer"], []).append(f"{pair['transport']}: {pair['reason']}")
    parts = []
    for peer, name in worker["transports"].items():
        reasons = "; ".join(refused.get(peer, []) + refused.get("", []))
        parts.append(f"{peer}: {name}" + (f" ({reasons})" if reasons else ""))
    return ", ".join(parts)


def make_speculation_table(status: dict[str, Any]) -> FittedTable:
    """Return one row for each worker and method that has drafted, or is configured to draft."""
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
            totals[method][metric.name.removeprefix(_NUMBERS).removesuffix("_total")] = value
    return totals


def _brought(total: dict[str, float]) -> list[str]:
    drafts, drafted = total.get("drafts", 0), total.get("draft_tokens", 0)
    accepted = total.get("accepted_tokens", 0)
    return [
        f"{drafts:.0f}",
        _share(accepted, drafted),
        f"{1 + accepted / drafts:.2f}" if drafts else "-",
    ]


def _current_k(worker: dict[str, Any], method: str) -> str:
    """Return the average number of draft tokens that the worker's requests ask for in a step."""
    for state in (worker.get("speculation") or {}).get("methods", ()):
        if state["method"] == method and state.get("num_requests"):
            return f"{state.get('num_tokens', 0) / state['num_requests']:.1f}"
    return "-"


_BAR = 10
_FULL = 0.9
"""The share of used KV blocks from which a pool is shown as nearly full."""


class Snapshot(NamedTuple):
    """The server's state at one time, in monotonic seconds."""

    at: float
    cluster: dict[str, Any]
    workers: dict[str, dict[str, Any]]

    @classmethod
    def fetch(cls, http: httpx.Client) -> Snapshot:
        """Ask the server for its state. Raises `ServerError`."""
        cluster = fields_of(http.get("/cluster"), "workers")
        workers = fields_of(http.get("/workers"), "workers")["workers"]
        return cls(time.monotonic(), cluster, {worker["id"]: worker for worker in workers})


def show_top(url: str, api_key: str | None, *, once: bool, interval_s: float) -> None:
    """Show frames until Ctrl-C, or one frame with the rates of one interval. Raises `ServerError`."""
    with contextlib.suppress(KeyboardInterrupt), client(url, api_key) as http:
        latest = Snapshot.fetch(http)

        def view() -> RenderableType:
            nonlocal latest
            before, latest = latest, Snapshot.fetch(http)
            return frame(url, before, latest)

        time.sleep(interval_s)
        _show(view, once, interval_s, screen=True)


def frame(url: str, before: Snapshot, after: Snapshot) -> RenderableType:
    """Show what happened between two snapshots."""
    parts: list[RenderableType] = [_head(url, before, after), _workers(before, after)]
    parts += [table for table in (_links(before, after), _drafts(before, after)) if table.row_count]
    return Group(*parts)


def _head(url: str, before: Snapshot, after: Snapshot) -> Text:
    load = [worker["load"] for worker in after.cluster["workers"]]
    requests = sum(worker["requests"] for worker in load)
    tokens = sum(_rate(before, after, worker, "computed_tokens_total") for worker in after.workers)
    policy = after.cluster["placement"]
    head = Text(f"{url}   {requests} requests at workers   {tokens:,.0f} tokens/s computed", style="bold")
    head.append(f"   placement {policy['prefill']}/{policy['decode']}, drafts {policy['drafts']}")
    if after.cluster["awaited"]:
        head.append(f"\nbeing started: {', '.join(after.cluster['awaited'])}", style="bold red")
    return head


def _workers(before: Snapshot, after: Snapshot) -> FittedTable:
    columns = ("worker", "role", "host", "state", "run", "wait", "KV", "hits", "steps/s", "ms", "tokens/s")
    table = FittedTable(*columns, optional=("host", "ms", "role"))
    for worker_id, worker in after.workers.items():
        steps = _gained(before, after, worker_id, "steps")
        busy_s = _counted(before, after, worker_id, "engine_seconds_total")
        state = worker["lifecycle"]
        table.add_row(
            worker_id,
            worker["role"],
            worker["host"],
            Text(state, style="" if state == "ready" else "bold red"),
            str(worker["num_running"]),
            str(worker["num_waiting"]),
            _bar(worker["kv_usage"]),
            _share(
                _gained(before, after, worker_id, "prefix_hit_tokens"),
                _gained(before, after, worker_id, "prefix_query_tokens"),
            ),
            f"{steps / (after.at - before.at):.0f}",
            f"{1000 * busy_s / steps:.1f}" if steps else "-",
            f"{_rate(before, after, worker_id, 'computed_tokens_total'):,.0f}",
        )
    return table


def _links(before: Snapshot, after: Snapshot) -> FittedTable:
    """Return a row for each link in use: its current traffic, and its measured bandwidth and latency."""
    table = FittedTable("from", "to", "over", "now", "up to", "latency", "transfers/s")
    for link in after.cluster["links"]:
        names = ("kv_transfer_bytes_total", "kv_transfers_total")
        sent, transfers = (_of_pair(after, link, name) - _of_pair(before, link, name) for name in names)
        seconds = after.at - before.at
        table.add_row(
            link["from"],
            link["to"],
            link["transport"],
            f"{_bytes(max(sent, 0.0) / seconds)}/s",
            f"{_bytes(link['bytes_per_s'])}/s" if link["bytes_per_s"] else "-",
            f"{1000 * link['latency_s']:.2f} ms" if link["bytes_per_s"] else "-",
            f"{max(transfers, 0.0) / seconds:.1f}",
        )
    return table


def _drafts(before: Snapshot, after: Snapshot) -> FittedTable:
    """Return a row for each decode worker and method: its drafts in the interval, and where they are made."""
    columns = ("drafts of", "method", "drafts/s", "accepted", "tokens/round", "made at")
    table = FittedTable(*columns, wrapped="made at")
    made: dict[str, list[str]] = {}
    for each in after.cluster["drafts"]:
        made.setdefault(each["decode"], []).append(f"{each['at'] or 'nowhere'}: {each['requests']}")
    for worker_id, worker in after.workers.items():
        earlier = spec_decode_totals(_counters(before, worker_id))
        for method, totals in spec_decode_totals(worker["counters"]).items():
            gained = {name: total - earlier.get(method, {}).get(name, 0.0) for name, total in totals.items()}
            drafts = gained.get("drafts", 0.0)
            if drafts < 0:
                continue  # the worker was restarted
            table.add_row(
                worker_id,
                method,
                f"{drafts / (after.at - before.at):.0f}",
                *_brought(gained)[1:],
                ", ".join(made.get(worker_id, ())) or "-",
            )
    return table


def _counters(snapshot: Snapshot, worker_id: str) -> Mapping[str, float]:
    found: Mapping[str, float] = snapshot.workers.get(worker_id, {}).get("counters", {})
    return found


def _counted(before: Snapshot, after: Snapshot, worker_id: str, name: str) -> float:
    earlier = _counters(before, worker_id).get(name, 0.0)
    return max(_counters(after, worker_id).get(name, 0.0) - earlier, 0.0)


def _rate(before: Snapshot, after: Snapshot, worker_id: str, name: str) -> float:
    return _counted(before, after, worker_id, name) / (after.at - before.at)


def _gained(before: Snapshot, after: Snapshot, worker_id: str, field: str) -> float:
    """Return the increase of a field that is not one of the worker's counters; 0 after a restart."""
    earlier: float = before.workers.get(worker_id, {}).get(field, 0)
    return max(float(after.workers[worker_id][field]) - earlier, 0.0)


def _of_pair(snapshot: Snapshot, link: Mapping[str, Any], name: str) -> float:
    for pair in snapshot.workers.get(link["from"], {}).get("pairs", ()):
        if (pair["peer"], pair["transport"]) == (link["to"], link["transport"]):
            return float(pair.get("counters", {}).get(name, 0.0))
    return 0.0


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _bar(usage: float) -> Text:
    filled = round(usage * _BAR)
    text = "█" * filled + "░" * (_BAR - filled) + f" {usage:4.0%}"
    return Text(text, style="red" if usage >= _FULL else "")


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"
