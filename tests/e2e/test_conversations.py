"""Prefixes are fetched from the worker that has them; requests placed by cost give the same tokens. fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from router.placement.interface import Placement, PolicyResult, PolicyState, RequestFacts
from router.workers.kv_index import hash_blocks
from tests.e2e.architectures import prompt
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import assert_greedy

WORKERS = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
PROMPT_TOKENS = 320
POOL_BLOCKS = 64


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder, {"prefill-0": "", "prefill-1": "", "decode-0": ""}) as serving:
        yield serving


def test_links_are_made_before_the_first_request(serving: HttpServing) -> None:
    def connected() -> bool:
        states = serving.worker_states()
        return all(states[f"prefill-{n}"]["transports"].get("decode-0") == "shm" for n in (0, 1))

    serving.wait(connected)
    assert serving.metric("tandem_placements_total") == 0


def test_the_second_turn_fetches_the_first_answer_from_its_decode_worker(
    serving: HttpServing, reference: PreTrainedModel
) -> None:
    first = prompt(40, seed=1)
    conversation = first + serving.tokens(first, 200)
    second = conversation + prompt(50, seed=2)
    assert_greedy(reference, second, serving.tokens(second, 12), 12)
    serving.wait_empty()
    fetched = sum(serving.counter(f"prefill-{n}", "prefix_blocks_fetched_total") for n in (0, 1))
    lent = serving.counter("decode-0", "prefix_blocks_lent_total")
    assert fetched == lent >= 200 // 16 - 1


def test_requests_placed_by_cost_give_the_same_tokens(folder: Path, reference: PreTrainedModel) -> None:
    rng = random.Random(0)
    prompts = [prompt(rng.choice((5, 60, 300)), seed) for seed in range(12)]
    with HttpServing(folder, placement="cost", itl_budget=0.002) as serving, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda prompt: serving.tokens(prompt, 20), prompts)
        for each, tokens in zip(prompts, answers, strict=True):
            assert_greedy(reference, each, tokens, 20)
        decisions = serving.http.get("/decisions").json()["decisions"]
        cluster = serving.http.get("/cluster").json()
        serving.wait_empty()
    assert len(decisions) == len(prompts)
    observed = [decision["observed"]["tpot_s"] for decision in decisions]
    assert min(observed) >= 0 < max(observed), "0: all tokens came at once, as after a pause of the router"
    costs = [worker["costs"] for worker in cluster["workers"]]
    assert all(each["kv_bytes"] > 0 for each in costs)
    assert any(each["step_s"] > 0 for each in costs), "a worker that got no request has taken no step"


def text(seed: int) -> list[int]:
    return prompt(PROMPT_TOKENS, seed)


def ask(serving: HttpServing, seed: int) -> list[int]:
    return serving.tokens(text(seed), 4)


def lent(serving: HttpServing) -> dict[str, float]:
    return {worker: serving.counter(worker, "prefix_blocks_lent_total") for worker in WORKERS}


def test_an_evicted_prefix_is_fetched_from_a_peer(folder: Path, reference: PreTrainedModel) -> None:
    """Both pairs of workers hold a prompt, then others displace it in the first pair alone."""
    options = {"max_model_len": 512, "kv_cache_memory_bytes": POOL_BLOCKS * block_bytes(reference)}
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
        assert_greedy(reference, text(1), ask(serving, 1), 4)
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
    return feed.index.find(hash_blocks(cache.root(), text(seed), cache.block_size).keys)
