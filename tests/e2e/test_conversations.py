"""A prefill worker fetches a conversation's KV from the worker that has it. fp32."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import greedy


@pytest.fixture
def serving(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder, {"prefill-0": "", "prefill-1": "", "decode-0": ""}) as serving:
        yield serving


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def ask(serving: HttpServing, token_ids: list[int], max_tokens: int) -> list[int]:
    body = {"model": "model", "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = serving.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def test_the_second_turn_fetches_the_first_answer_from_its_decode_worker(
    serving: HttpServing, reference: PreTrainedModel
) -> None:
    first = prompt(40, seed=1)
    conversation = first + ask(serving, first, 340)
    second = conversation + prompt(50, seed=2)
    assert ask(serving, second, 12) == greedy(reference, second, 12)
    serving.wait_empty()
    fetched = sum(serving.counter(f"prefill-{n}", "prefix_blocks_fetched_total") for n in (0, 1))
    lent = serving.counter("decode-0", "prefix_blocks_lent_total")
    assert fetched == lent >= 340 // 16 - 1


def test_links_are_made_before_the_first_request(serving: HttpServing) -> None:
    def connected() -> bool:
        states = serving.worker_states()
        return all(states[f"prefill-{n}"]["transports"].get("decode-0") == "shm" for n in (0, 1))

    serving.wait(connected)
    assert serving.metric("tandem_placements_total") == 0
