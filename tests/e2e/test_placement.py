"""Requests placed by measured cost, whole or split, give the same tokens. fp32."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedModel

from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import greedy


def test_requests_placed_by_cost_give_the_same_tokens(folder: Path, reference: PreTrainedModel) -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(3, VOCAB_SIZE), k=rng.choice((5, 60, 300))) for _ in range(12)]

    def ask(prompt: list[int]) -> list[int]:
        body = {"model": "model", "prompt": prompt, "max_tokens": 20, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        answer = serving.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    with HttpServing(folder, placement="cost", itl_budget=0.002) as serving, ThreadPoolExecutor(8) as pool:
        for prompt, tokens in zip(prompts, pool.map(ask, prompts), strict=True):
            assert tokens == greedy(reference, prompt, 20)
        decisions = serving.http.get("/decisions").json()["decisions"]
        cluster = serving.http.get("/cluster").json()
        serving.wait_empty()
    assert len(decisions) == len(prompts)
    observed = [decision["observed"]["tpot_s"] for decision in decisions]
    assert min(observed) >= 0 < max(observed), "0: all tokens came at once, as after a pause of the router"
    costs = [worker["costs"] for worker in cluster["workers"]]
    assert all(each["kv_bytes"] > 0 for each in costs)
    assert any(each["step_s"] > 0 for each in costs), "a worker that got no request has taken no step"
