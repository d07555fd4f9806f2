"""The report of `tandem status` about transports and speculation."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from deploy.status import _COLUMNS, make_table, make_view, output_console

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
