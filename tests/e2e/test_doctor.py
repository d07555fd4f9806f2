"""Real servers tell what holds them up and what KV transfers took: the doctor, `/metrics` and the log."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from models.bundled import BUNDLED_MODEL
from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.load import load
from tests.e2e.serving import HttpServing
from tests.e2e.test_speculation import options
from tests.faults.proxy import CHUNK, Damage, Proxy

WATCHED_S = 1.0
LOOKS = 30
WHOLE = {"decode-0": ""}
POOL = 96 << 20
"""Room for the longest of all loads: 64 streams of 408 tokens."""
BUNDLED_IDS = 2000

Load = Callable[[HttpServing], AbstractContextManager[None]]


def running(streams: int, prompt_tokens: int, vocab_size: int = VOCAB_SIZE, **fields: Any) -> Load:
    return lambda serving: load(serving.url, streams, prompt_tokens, vocab_size, **fields)


def diagnose(serving: HttpServing, name: str, under: Load) -> list[dict[str, Any]]:
    """Return the doctor's findings under a load, once they include the expected bottleneck."""
    with under(serving):
        for _ in range(LOOKS):
            found = findings(serving)
            if names(found)[:1] == [name]:
                break
    serving.wait_empty()
    assert names(found)[:1] == [name], found
    return found


def findings(serving: HttpServing) -> list[dict[str, Any]]:
    """Return the doctor's findings, but that the router waits for a core: other programs may use it."""
    answer = serving.http.get("/doctor", params={"seconds": WATCHED_S})
    assert answer.status_code == 200, answer.text
    return [finding for finding in answer.json()["findings"] if finding["name"] != "router"]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [finding["name"] for finding in found]


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder, kv_cache_memory_bytes=POOL, max_num_seqs=64) as serving:
        yield serving


def test_an_idle_server_and_a_light_load_have_nothing(pair: HttpServing) -> None:
    assert names(findings(pair)) == ["nothing"]
    assert names(diagnose(pair, "nothing", running(1, 30, max_tokens=20))) == ["nothing"]


def test_long_prompts_wait_for_prefill(pair: HttpServing) -> None:
    found = diagnose(pair, "prefill", running(24, 400, max_tokens=2))
    assert found[0]["worker"] == "prefill-0"
    assert not {"decode", "kv_room", "draft"} & set(names(found))


def test_long_answers_wait_for_decode(pair: HttpServing) -> None:
    found = diagnose(pair, "decode", running(64, 8, max_tokens=400))
    assert found[0]["worker"] == "decode-0"
    assert not {"prefill", "draft", "kv_room", "queue"} & set(names(found))


def test_a_slow_wire_is_named_as_the_bottleneck(folder: Path) -> None:
    """The prefill worker gets the proxy's address before it connects."""
    with HttpServing(folder, WHOLE, kv_cache_memory_bytes=POOL, kv_transports="tcp") as serving:
        worker = serving.router.state.registry.named("decode-0")
        offer = worker.address.offers[0]
        stops = [Damage("delay", CHUNK * index, seconds=0.03, connection=-1) for index in range(2000)]
        proxy = Proxy(offer.address, stops)
        slow = msgspec.structs.replace(offer, address=proxy.address)
        worker.address = msgspec.structs.replace(worker.address, offers=[slow])
        serving.add("prefill-0")
        try:
            found = diagnose(serving, "transfer", running(2, 300, max_tokens=4))
        finally:
            proxy.close()
        assert "prefill-0 sends to decode-0 over tcp" in found[0]["summary"]
        assert "prefill" not in names(found)


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[HttpServing]:
    """Start a server with a pool for three requests and a queue for eight."""
    bounds = {"max_queued_requests": 8, "kv_cache_memory_bytes": 64 * 12288}
    with HttpServing(folder, WHOLE, disaggregation=False, **bounds) as serving:
        yield serving


def test_long_requests_wait_for_room_in_a_small_pool(small: HttpServing) -> None:
    found = diagnose(small, "kv_room", running(8, 200, max_tokens=100))
    assert not {"transfer", "draft", "queue"} & set(names(found))


def test_refused_requests_name_the_bound_of_the_queue(small: HttpServing) -> None:
    found = diagnose(small, "queue", running(16, 10, max_tokens=20))
    assert "--max-queued-requests" in found[0]["change"]
    assert not {"transfer", "kv_room"} & set(names(found))


@pytest.fixture(scope="module")
def drafting() -> Iterator[HttpServing]:
    """Start a server that always drafts sixteen tokens. Most of them are wrong, which costs much more time
    than other programs' use of the machine makes uncertain.
    """
    chosen = options("draft_model")
    many = msgspec.structs.replace(chosen.pop("speculative_config"), num_speculative_tokens=16)
    with HttpServing(
        BUNDLED_MODEL, WHOLE, disaggregation=False, speculative_config=many, **chosen
    ) as serving:
        yield serving


WILD = {"max_tokens": 300, "temperature": 2.0}


def test_drafts_that_are_rarely_accepted_are_named_as_a_cost(drafting: HttpServing) -> None:
    """Few enough requests run at once not to slow each other."""
    found = diagnose(drafting, "draft", running(2, 30, BUNDLED_IDS, **WILD))
    assert not {"transfer", "kv_room", "queue"} & set(names(found))
    without = running(4, 30, BUNDLED_IDS, speculative={"enabled": False}, **WILD)
    with without(drafting):
        assert "draft" not in names(findings(drafting))


STAGES = ("reserve_time", "transfer_time", "transfer_exposed_time", "transfer_wait_time", "handoff_time")
TOLD = (*("queue_s", "placement_s", "earlier_s", "worker_queue_s", "prefill_s"), *("takeover_s", "decode_s"))
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
