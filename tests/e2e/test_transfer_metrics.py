"""A server's `/metrics` and log about KV transfers, with real workers."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import HttpServing

STAGES = ("reserve_time", "transfer_time", "transfer_exposed_time", "transfer_wait_time", "handoff_time")
TOLD = (
    *("queue_s", "placement_s", "earlier_s", "worker_queue_s", "prefill_s"),
    *("takeover_s", "decode_s"),
)
LENGTHS = (200, 33, 120)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder, kv_transports="tcp") as serving:
        yield serving


def complete(serving: HttpServing, length: int) -> None:
    body = {"model": "model", "prompt": [3 + length % 50] * length, "max_tokens": 4, "ignore_eos": True}
    assert serving.http.post("/v1/completions", json=body).status_code == 200


def test_each_request_is_in_the_stage_histograms_and_in_the_log(
    serving: HttpServing, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "router.observe.timing"):
        for length in LENGTHS:
            complete(serving, length)
    total = dict.fromkeys(STAGES, 0.0)
    for stage in STAGES:
        name = f"tandem_request_kv_{stage}_seconds"
        assert serving.metric(f"{name}_count") == len(LENGTHS)
        total[stage] = serving.metric(f"{name}_sum")
    assert 0 < total["transfer_exposed_time"] <= total["transfer_time"] < 30
    assert 0 < total["reserve_time"] < 30 and 0 < total["handoff_time"] < 30
    blocks = sum(-(-length // 16) for length in LENGTHS)
    moved = serving.metric("tandem_request_kv_transfer_bytes_sum")
    assert moved > 0 and moved % blocks == 0
    lines = [message for message in caplog.messages if "handoff_s" in message]
    assert len(lines) == len(LENGTHS)
    for line, length in zip(lines, LENGTHS, strict=True):
        assert f"length, prompt_tokens {length}, mode split" in line
        assert re.search(r"transfer {'transport': 'tcp', 'transferred_bytes': \d+, .*}, tokens 4", line)


def test_the_pairs_totals_agree_with_the_requests(serving: HttpServing) -> None:
    complete(serving, 64)
    moved = serving.metric("tandem_request_kv_transfer_bytes_sum")
    pair = {"worker": "prefill-0", "peer": "decode-0", "transport": "tcp"}
    serving.wait(lambda: serving.metric("tandem_kv_transfer_bytes_total", **pair) == moved)
    back = {"worker": "decode-0", "peer": "prefill-0", "transport": "tcp"}
    serving.wait(lambda: serving.metric("tandem_kv_receive_bytes_total", **back) == moved)
    serving.wait(lambda: serving.metric("tandem_kv_transport", **pair) == 1)
    assert 0 < serving.metric("tandem_kv_transfer_wire_seconds_total", **pair) < 30
    assert serving.metric("tandem_kv_transfer_overlap_ratio", **pair) <= 1


def test_the_stages_of_a_timing_record_add_up(serving: HttpServing) -> None:
    """They add up to the total that the router measured, which is less than the client waited."""
    unaccounted = []
    for index in range(3):  # several tries, since the machine may be busy
        body = {"prompt": [70 + index] * 200, "max_tokens": 8, "ignore_eos": True, "return_timing": True}
        began = time.monotonic()
        answer = serving.http.post("/v1/completions", json=body)
        waited_s = time.monotonic() - began
        timing = answer.json()["timing"]
        (choice,) = timing["choices"]
        assert (choice["mode"], choice["tokens"], choice["decode_steps"]) == ("split", 8, 7)
        assert choice["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
        total, stages = choice["total_s"], timing["prepare_s"] + sum(choice[name] for name in TOLD)
        assert 0 < choice["prefill_s"] < choice["ttft_s"] < total < waited_s
        transfer = choice["transfer"]
        assert transfer["transport"] == "tcp" and transfer["transferred_bytes"] > 0
        # The router may hear of the first token late in the hand-off, which makes takeover_s shorter.
        assert 0 < choice["decode_queue_s"] <= transfer["handoff_s"] < total
        unaccounted.append((total - stages) / total)
    assert any(-0.01 < share < 0.2 for share in unaccounted), unaccounted
