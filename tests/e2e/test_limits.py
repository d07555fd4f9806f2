"""Limits of served requests: a key's flood leaves others their share, and a timeout ends each stage."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.serving import PAIR, HttpServing

FLOOD, SINGLES = 64, 4
KEYS = "flooder,other"
LONGEST_S = 200.0


def ask(serving: HttpServing, key: str, seed: int, max_tokens: int) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of tokens."""
    rng = random.Random(seed)
    body: dict[str, Any] = {"prompt": rng.choices(range(10, VOCAB_SIZE), k=200), "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    began, first, events = time.monotonic(), 0.0, 0
    headers = {"authorization": f"Bearer {key}"}
    with serving.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.monotonic() - began
            events += line.startswith("data: {")
    return first, events


def waits(serving: HttpServing, first_seed: int) -> float:
    """Return the median time to the first token of requests, one after the other."""
    return statistics.median(ask(serving, "other", first_seed + index, 8)[0] for index in range(SINGLES))


def test_a_flood_leaves_other_keys_their_share(folder: Path) -> None:
    slow = dict.fromkeys(PAIR, "slow:0.01")
    with HttpServing(folder, slow, api_key=KEYS) as serving, ThreadPoolExecutor(FLOOD) as pool:
        alone = waits(serving, 1000)
        began = time.monotonic()
        flood = [pool.submit(ask, serving, "flooder", index, 16 + index) for index in range(FLOOD)]
        serving.wait(lambda: serving.metric("tandem_num_requests_held", api_key="0") > FLOOD / 3)
        beside = waits(serving, 2000)
        flood_s = max(each.result(LONGEST_S)[0] for each in flood)
        alone = max(alone, waits(serving, 3000))  # the host may have become busier meanwhile
        assert beside < 8 * alone
        assert beside < flood_s / 4, "the flooder's last one waits for the flood"
        assert time.monotonic() - began < LONGEST_S
        assert serving.metric("tandem_num_requests_held") == 0
        assert serving.metric("tandem_api_key_tokens_total", api_key="0") > 0
        serving.wait_empty()


TIMEOUT_S = 1.5
MARGIN_S = 15.0
FROZEN = "STOP:before"
STAGES = {
    "in prefill": {"prefill-0": "slow:0.5"},
    "waiting for its blocks": {"decode-0": f"{FROZEN}:_on_reserve:1"},
    "as its blocks arrive": {"decode-0": f"{FROZEN}:on_transfer:1"},
    "at the manifest": {"decode-0": f"{FROZEN}:_on_handoff:1"},
    "in decode": {"decode-0": "slow:0.3"},
}


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("stage", STAGES)
def test_a_timeout_ends_a_request_at_every_stage(folder: Path, stage: str) -> None:
    """Leases, hand-offs and worker deaths all have later deadlines."""
    options = {"request_timeout": TIMEOUT_S, "handoff_timeout": 60.0, "worker_timeout": 60.0}
    with HttpServing(folder, {**PAIR, **STAGES[stage]}, **options) as serving:
        body = {"model": "model", "prompt": [5] * 400, "max_tokens": 24, "ignore_eos": True}
        asked = time.monotonic()
        answer = serving.http.post("/v1/completions", json=body)
        elapsed = time.monotonic() - asked
        assert answer.status_code == 504, answer.text
        assert "longer than 1.5 s" in answer.json()["error"]["message"]
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "error"
        assert TIMEOUT_S <= elapsed < TIMEOUT_S + MARGIN_S
        if FROZEN not in STAGES[stage].get("decode-0", ""):
            serving.wait_empty()
        else:
            serving.wait(lambda: serving.counter("prefill-0", "handoffs_total") == 0)
            serving.wait(lambda: used_blocks(serving, "prefill-0") == 0)


def used_blocks(serving: HttpServing, worker_id: str) -> int:
    state = serving.worker_states()[worker_id]
    return int(state["total_blocks"] - state["free_blocks"] - state["cached_blocks"])
