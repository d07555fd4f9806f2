"""The reports of `tandem status` about transports and speculation, and the rates of `tandem top`."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from deploy.status import _COLUMNS, Snapshot, frame, make_table, make_view, output_console

WORKER: dict[str, Any] = {
    "id": "prefill-0",
    "role": "prefill",
    "lifecycle": "ready",
    "num_running": 0,
    "num_waiting": 0,
    "total_blocks": 10,
    "cached_blocks": 0,
    "kv_usage": 0.0,
    "prefix_query_tokens": 0,
    "prefix_hit_tokens": 0,
    "transports": {},
    "pairs": [],
    "counters": {"steps_total": 3.0},
    "start_up": {"speculation": "none (a request may ask for ngram)"},
}
HERE = {"peer": "", "transport": "ucx", "refused": "unavailable", "reason": "no nixl"}
SHM = {"peer": "decode-0", "transport": "shm", "refused": "other_host", "reason": "another host"}
TCP = {"peer": "decode-0", "transport": "tcp", "in_use": True}


@pytest.mark.parametrize(
    ("transports", "pairs", "told"),
    [
        ({}, [], " - "),
        ({"decode-0": "shm"}, [], " decode-0: shm "),
        ({"decode-0": "tcp"}, [SHM, TCP], " decode-0: tcp (shm: another host) "),
        ({"decode-0": "tcp"}, [HERE, SHM, TCP], " decode-0: tcp (shm: another host; ucx: no nixl) "),
    ],
)
def test_the_transport_in_use_and_why_no_better_one(
    transports: dict[str, str], pairs: list[dict[str, Any]], told: str
) -> None:
    out = io.StringIO()
    table = make_table(
        "http://localhost", {"workers": [{**WORKER, "transports": transports, "pairs": pairs}]}
    )
    Console(file=out, width=250).print(table)
    (row,) = [line for line in out.getvalue().splitlines() if "prefill-0" in line]
    assert told in row + " "


def test_starting_workers_are_listed() -> None:
    awaited = [{"id": "decode-1", "role": "decode"}]
    out = io.StringIO()
    Console(file=out, width=250).print(
        make_table("http://localhost", {"workers": [WORKER], "awaited": awaited})
    )
    (row,) = [line for line in out.getvalue().splitlines() if "decode-1" in line]
    assert row.split()[:3] == ["decode-1", "decode", "awaited"]


@pytest.mark.parametrize(
    ("totals", "told"),
    [
        ({}, []),
        ({"ngram": (0, 0, 0)}, ["ngram 0 - - -"]),
        ({"ngram": (10, 40, 25)}, ["ngram 10 62% 3.50 -"]),
        ({"lookahead": (10, 0, 0)}, ["lookahead 10 - 1.00 -"]),
        ({"eagle": (4, 8, 0), "ngram": (1, 4, 4)}, ["eagle 4 0% 1.00 -", "ngram 1 100% 5.00 -"]),
    ],
)
def test_the_gain_of_each_method(totals: dict[str, tuple[float, float, float]], told: list[str]) -> None:
    counters = {"steps_total": 3.0}
    for method, (drafts, drafted, accepted) in totals.items():
        for name, value in (("drafts", drafts), ("draft_tokens", drafted), ("accepted_tokens", accepted)):
            counters[f'spec_decode_num_{name}_total{{method="{method}"}}'] = float(value)
        counters[f'spec_decode_draft_seconds_total{{method="{method}"}}'] = 0.5
    _, *rows = rows_of(make_view("http://localhost", {"workers": [{**WORKER, "counters": counters}]}))
    assert rows == [f"prefill-0 {row}" for row in told]


@pytest.mark.parametrize("start_up", ["medusa", "medusa (model m)"])
def test_a_method_before_it_has_drafted(start_up: str) -> None:
    worker = {**WORKER, "start_up": {"speculation": start_up}}
    _, row = rows_of(make_view("http://localhost", {"workers": [worker]}))
    assert row == "prefill-0 medusa 0 - - -"


def test_the_current_k_counts_running_requests() -> None:
    states = [
        {"method": "ngram", "num_requests": 4, "num_tokens": 10},
        {"method": "eagle", "num_requests": 2},
    ]
    counters = {f'spec_decode_num_drafts_total{{method="{method}"}}': 1.0 for method in ("ngram", "eagle")}
    worker = {**WORKER, "counters": counters, "speculation": {"methods": states}}
    _, *rows = rows_of(make_view("http://localhost", {"workers": [worker]}))
    assert rows == ["prefill-0 ngram 1 - 1.00 2.5", "prefill-0 eagle 1 - 1.00 0.0"]


def test_a_narrow_terminal_cuts_no_column() -> None:
    worker = WORKER | {
        "id": "prefill-12",
        "lifecycle": "draining",
        "num_waiting": 1000,
        "total_blocks": 131072,
        "kv_usage": 1.0,
        "transports": {"decode-0": "tcp"},
        "pairs": [SHM, TCP],
    }
    out = io.StringIO()
    Console(file=out, width=80).print(make_view("http://localhost", {"workers": [worker]}))
    text = " ".join(out.getvalue().split())
    assert "…" not in text
    assert "worker state run wait KV used cached hits transports" in text
    assert "prefill-12 draining 0 1000 100% of 131072 0% - decode-0: tcp (shm: another host)" in text


def test_a_pipe_gets_all_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    output_console().print(make_view("http://localhost", {"workers": [WORKER]}))
    assert " ".join(_COLUMNS) in " ".join(capsys.readouterr().out.split())


def rows_of(view: RenderableType) -> list[str]:
    """Return the rows that name the worker on a narrow terminal, without borders."""
    out = io.StringIO()
    Console(file=out, width=80).print(view)
    rows = [line.replace("│", " ") for line in out.getvalue().splitlines() if "prefill-0" in line]
    return [" ".join(row.split()) for row in rows]


PAIR = {"peer": "decode-0", "transport": "tcp", "counters": {"kv_transfer_bytes_total": 1e6}}
PREFILL = WORKER | {
    "host": "10.0.0.1",
    "num_running": 1,
    "num_waiting": 4,
    "kv_usage": 0.25,
    "steps": 100,
    "prefix_hit_tokens": 50,
    "prefix_query_tokens": 100,
    "counters": {"computed_tokens_total": 1000.0, "engine_seconds_total": 1.0},
    "pairs": [PAIR],
}
DRAFTS = {
    'spec_decode_num_drafts_total{method="ngram"}': 10.0,
    'spec_decode_num_draft_tokens_total{method="ngram"}': 40.0,
    'spec_decode_num_accepted_tokens_total{method="ngram"}': 20.0,
}
DECODE = PREFILL | {"id": "decode-0", "role": "decode", "kv_usage": 0.95, "pairs": [], "counters": DRAFTS}
LOAD = {"requests": 3, "rows": 0, "context_tokens": 0, "prompts": 0, "prefill_tokens": 0}
LINK = {"from": "prefill-0", "to": "decode-0", "transport": "tcp", "latency_s": 0.0012, "bytes_per_s": 1.5e9}
CLUSTER: dict[str, Any] = {
    "placement": {"prefill": "cost", "decode": "least_loaded", "drafts": "local"},
    "workers": [{"id": "prefill-0", "load": LOAD}, {"id": "decode-0", "load": LOAD}],
    "awaited": ["draft-0"],
    "links": [LINK],
    "drafts": [{"decode": "decode-0", "at": None, "requests": 2}],
}


def look(at: float, *workers: dict[str, Any]) -> Snapshot:
    return Snapshot(at, CLUSTER, {worker["id"]: copy.deepcopy(worker) for worker in workers})


def shown(before: Snapshot, after: Snapshot, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(frame("http://localhost", before, after))
    return " ".join(out.getvalue().replace("│", " ").split())


def test_rates_come_from_two_readings() -> None:
    before = look(10.0, PREFILL, DECODE)
    after = look(12.0, PREFILL, DECODE)
    prefill, decode = after.workers["prefill-0"], after.workers["decode-0"]
    prefill["steps"] += 20
    prefill["counters"] = {"computed_tokens_total": 3000.0, "engine_seconds_total": 1.1}
    prefill["prefix_query_tokens"], prefill["prefix_hit_tokens"] = 200, 125
    prefill["pairs"][0]["counters"]["kv_transfer_bytes_total"] += 5e6
    decode["counters"] = {name: 2 * value for name, value in DRAFTS.items()}
    text = shown(before, after)
    assert "6 requests at workers 1,000 tokens/s computed placement cost/least_loaded, drafts local" in text
    assert "being started: draft-0" in text
    assert "prefill-0 prefill 10.0.0.1 ready 1 4 ██░░░░░░░░ 25% 75% 10 5.0 1,000" in text
    assert "prefill-0 decode-0 tcp 2 MB/s 1.5 GB/s 1.20 ms 0.0" in text
    assert "decode-0 ngram 5 50% 3.00 nowhere: 2" in text


def test_a_restarted_or_new_worker_has_no_negative_rates() -> None:
    fresh = DECODE | {"steps": 0, "counters": dict.fromkeys(DRAFTS, 0.0)}
    text = shown(look(10.0, DECODE), look(11.0, fresh, PREFILL))
    assert "decode-0 decode 10.0.0.1 ready 1 4 ██████████ 95% - 0 - 0" in text
    assert "decode-0 ngram" not in text
    assert "prefill-0 prefill" in text


def test_a_narrow_terminal_leaves_columns_out_and_cuts_none() -> None:
    busy = PREFILL | {"host": "ip-10-0-12-34.compute.internal", "id": "prefill-12", "lifecycle": "draining"}
    text = shown(look(10.0, busy, DECODE), look(12.0, busy, DECODE), width=80)
    assert "…" not in text and "internal" not in text
    assert "worker state run wait KV hits steps/s tokens/s" in text
    assert "prefill-12 draining 1 4 ██░░░░░░░░ 25% - 0 0" in text
