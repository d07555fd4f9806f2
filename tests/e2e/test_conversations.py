"""Prefixes are fetched from the worker that has them; requests placed by cost give the same tokens. fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.e2e.architectures import prompt
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import assert_greedy


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
