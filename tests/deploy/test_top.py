"""`tandem top` computes its rows from two readings of a server."""

from __future__ import annotations

import copy
import io
from typing import Any

from rich.console import Console

from deploy.status import Snapshot, frame

PAIR = {"peer": "decode-0", "transport": "tcp", "counters": {"kv_transfer_bytes_total": 1e6}}
PREFILL: dict[str, Any] = {
    "id": "prefill-0",
    "role": "prefill",
    "host": "10.0.0.1",
    "lifecycle": "ready",
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
LINK = {
    "from": "prefill-0",
    "to": "decode-0",
    "transport": "tcp",
    "latency_s": 0.0012,
    "bytes_per_s": 1.5e9,
}
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
