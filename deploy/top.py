"""`tandem top`: shows workers, links and drafts with their rates, live in a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.client import checked, client
from deploy.status import FittedTable, output_console, spec_decode_totals

_BAR = 10
_FULL = 0.9
"""The share of a KV pool from which it is shown as nearly full."""


class Snapshot(NamedTuple):
    """The server's state at one time, in monotonic seconds."""

    at: float
    cluster: dict[str, Any]
    workers: dict[str, dict[str, Any]]

    @classmethod
    def fetch(cls, http: httpx.Client) -> Snapshot:
        """Ask the server for its state. Raises `ServerError`."""
        cluster = checked(http.get("/cluster")).json()
        workers = checked(http.get("/workers")).json()["workers"]
        return cls(time.monotonic(), cluster, {worker["id"]: worker for worker in workers})


def show_top(url: str, api_key: str | None, *, once: bool, interval_s: float) -> None:
    """Show frames until Ctrl-C, or one frame with the rates of one interval. Raises `ServerError`."""
    with contextlib.suppress(KeyboardInterrupt), client(url, api_key) as http:
        before = Snapshot.fetch(http)
        time.sleep(interval_s)
        if once or not sys.stdout.isatty():
            output_console().print(frame(url, before, Snapshot.fetch(http)))
            return
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                after = Snapshot.fetch(http)
                live.update(frame(url, before, after), refresh=True)
                before = after
                time.sleep(interval_s)


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
        sent, transfers = (
            _of_pair(after, link, name) - _of_pair(before, link, name)
            for name in ("kv_transfer_bytes_total", "kv_transfers_total")
        )
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
    """Return a row for each decode worker and method: the interval's drafts, and where they are made."""
    columns = ("drafts of", "method", "drafts/s", "accepted", "tokens/round", "made at")
    table = FittedTable(*columns, wrapped="made at")
    made: dict[str, list[str]] = {}
    for each in after.cluster["drafts"]:
        made.setdefault(each["decode"], []).append(f"{each['at'] or 'nowhere'}: {each['requests']}")
    for worker_id, worker in after.workers.items():
        earlier = spec_decode_totals(_counters(before, worker_id))
        for method, totals in spec_decode_totals(worker["counters"]).items():
            gained = {name: total - earlier.get(method, {}).get(name, 0.0) for name, total in totals.items()}
            drafts, accepted = gained.get("drafts", 0.0), gained.get("accepted_tokens", 0.0)
            if drafts < 0:
                continue  # the worker was restarted
            table.add_row(
                worker_id,
                method,
                f"{drafts / (after.at - before.at):.0f}",
                _share(accepted, gained.get("draft_tokens", 0.0)),
                f"{1 + accepted / drafts:.2f}" if drafts else "-",
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
    """Return the increase of a worker's total that is not one of its counters; 0 after a restart."""
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
