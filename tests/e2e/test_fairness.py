"""One API key floods real workers while another sends single requests."""

from __future__ import annotations

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
