"""A prefix that one worker has evicted is fetched from another that still has it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from router.placement.interface import Placement, PolicyResult, PolicyState, RequestFacts
from router.workers.kv_index import hash_blocks
from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import greedy

WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
PROMPT_TOKENS = 320
POOL_BLOCKS = 64


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCAB_SIZE), k=PROMPT_TOKENS)


def ask(serving: HttpServing, seed: int) -> list[int]:
    body: dict[str, Any] = {"prompt": prompt(seed), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = serving.http.post("/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def lent(serving: HttpServing) -> dict[str, float]:
    return {worker: serving.counter(worker, "prefix_blocks_lent_total") for worker in WORKERS}


def test_an_evicted_prefix_is_fetched_from_a_peer(folder: Path, reference: PreTrainedModel) -> None:
    """Both pairs of workers hold a prompt, then others displace it in the first pair alone."""
    options = {
        "max_model_len": 512,
        "kv_cache_memory_bytes": POOL_BLOCKS * block_bytes(reference),
    }
    with HttpServing(folder, dict.fromkeys(WORKERS, ""), **options) as serving:
        for number in "01":
            use_only(serving, number)
            ask(serving, 1)
        serving.wait_empty()
        assert set(cached_blocks(serving, 1)) == set(WORKERS)
        use_only(serving, "0")
        for seed in range(2, 9):
            ask(serving, seed)
        serving.wait_empty()
        everything = PROMPT_TOKENS // 16
        assert cached_blocks(serving, 1) == {"prefill-1": everything, "decode-1": everything}
        before = lent(serving)
        assert ask(serving, 1) == greedy(reference, prompt(1), 4)
        serving.wait_empty()
        assert sum(lent(serving).values()) - sum(before.values()) >= everything - 1
        assert lent(serving)["prefill-0"] == before["prefill-0"]
        assert sum(serving.counter(worker, "prefix_fetch_failures_total") for worker in WORKERS) == 0


class OnePair:
    """A policy that uses only the workers with one number and fetches every longer prefix from others."""

    def __init__(self, number: str) -> None:
        self.prefill, self.decode = f"prefill-{number}", f"decode-{number}"

    def place(self, request: RequestFacts, cluster: object, state: PolicyState) -> PolicyResult:
        cached = {self.prefill: 0, **request.cached_tokens}
        best = max(cached, key=cached.__getitem__)
        prefix = best if cached[best] > cached[self.prefill] else None
        return Placement({"prefill": self.prefill, "decode": self.decode}, prefix=prefix), state


def use_only(serving: HttpServing, number: str) -> None:
    serving.router.state.placer._policy = OnePair(number)  # type: ignore[assignment]


def block_bytes(model: PreTrainedModel) -> int:
    config = model.config
    heads = config.num_key_value_heads
    return config.num_hidden_layers * 2 * 16 * heads * (config.hidden_size // config.num_attention_heads) * 4


def cached_blocks(serving: HttpServing, seed: int) -> dict[str, int]:
    """Return by worker how much of a prompt the router's index knows."""
    feed = serving.router.state.kv_feed
    (cache,) = feed.formats
    return feed.index.find(hash_blocks(cache.root(), prompt(seed), cache.block_size).keys)
