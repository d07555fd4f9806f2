"""The real server over HTTP: the openai client, streaming, stop strings, log-probabilities, aborts."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.e2e.architectures import VOCAB_SIZE
from tests.e2e.serving import HttpServing
from tests.worker.tiny_model import greedy

PROMPT = "def main(): return 0"
NUM_TOKENS = 24
NUM_SCHEMA_CASES = int(os.environ.get("SCHEMA_CASES", "20"))
"""Test cases for each operation of the API."""


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[HttpServing]:
    with HttpServing(folder) as serving:
        yield serving


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def client(serving: HttpServing) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(PROMPT)["input_ids"]


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int]) -> str:
    """Return the tokens and texts that Transformers generates."""
    return tokenizer.decode(greedy(reference, prompt_ids, NUM_TOKENS))


def asked(**fields: Any) -> dict[str, Any]:
    usual = {"model": "model", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return {**usual, "extra_body": {"ignore_eos": True}, **fields}


def test_completion_equals_generate(client: openai.OpenAI, expected: str, prompt_ids: list[int]) -> None:
    answer = client.completions.create(**asked())
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), NUM_TOKENS)


async def test_async_client_streams_many_at_once(serving: HttpServing, expected: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:

        async def one() -> str:
            stream = await client.completions.create(**asked(stream=True))
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(16))) == [expected] * 16


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_exactly(client: openai.OpenAI, expected: str, stream: bool) -> None:
    start = len(expected) // 2
    stop = expected[start : start + 3]
    answer = client.completions.create(**asked(stop=[stop], stream=stream))
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected[: expected.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_logprobs_equal_those_of_transformers(
    client: openai.OpenAI, reference: PreTrainedModel, prompt_ids: list[int]
) -> None:
    answer = client.completions.create(**asked(prompt=prompt_ids, max_tokens=6, logprobs=3, echo=True))
    token_ids = prompt_ids + greedy(reference, prompt_ids, 6)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    exact = [float(logprobs[index, token]) for index, token in enumerate(token_ids[1:])]
    got = answer.choices[0].logprobs
    assert got is not None and got.token_logprobs is not None and got.top_logprobs is not None
    assert got.token_logprobs[0] is None
    assert got.token_logprobs[1:] == pytest.approx(exact, abs=1e-3)
    best = logprobs[:-1].topk(3).values
    for row, top in zip(best, got.top_logprobs[1:], strict=True):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(row.tolist(), abs=1e-3)


async def test_random_aborts_and_disconnects_leak_nothing(serving: HttpServing) -> None:
    rng = random.Random(17)
    async with httpx.AsyncClient(base_url=serving.url, timeout=60) as client:
        outcomes = await asyncio.gather(*(_one_random_request(client, rng, index) for index in range(200)))
    assert set(outcomes) == {"finished", "left"}
    await asyncio.to_thread(serving.wait_empty)
    assert len(serving.worker_states()) == 2


async def _one_random_request(client: httpx.AsyncClient, rng: random.Random, index: int) -> str:
    body = {
        "model": "model",
        "prompt": [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 150))],
        "max_tokens": rng.randrange(1, 40),
        "stream": rng.random() < 0.7,
        "seed": index,
        "ignore_eos": True,
    }
    leave_after = rng.randrange(6)
    leaves = rng.random() < 0.5
    if not body["stream"]:
        try:
            async with asyncio.timeout(0.05 * leave_after if leaves else None):
                answer = await client.post("/v1/completions", json=body)
        except TimeoutError:
            return "left"
        return "finished" if answer.status_code == 200 else "failed"
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = 0
        async for line in response.aiter_lines():
            lines += bool(line)
            if leaves and lines > leave_after:
                return "left"
    return "finished"


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_the_openapi_description_leads_to_no_5xx(
    serving: HttpServing, mode: schemathesis.GenerationMode
) -> None:
    """Schemathesis sends requests that `/openapi.json` allows, and some that it just does not."""
    schema = schemathesis.openapi.from_url(f"{serving.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 15
    for operation in operations:
        is_allowed = mode is schemathesis.GenerationMode.POSITIVE
        if operation.body or is_allowed:
            call_by_schema(operation, mode, NUM_SCHEMA_CASES if operation.body else 1)
    assert serving.http.get("/ready").status_code == 200
    serving.wait_empty()


def call_by_schema(operation: Any, mode: schemathesis.GenerationMode, num_cases: int) -> None:
    @settings(
        max_examples=num_cases,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if case.path == "/doctor":
            case.query = {"seconds": "0.05"}
        if isinstance(case.body, dict):
            case.body.setdefault("max_tokens", 2)
        answer = case.call(timeout=30)
        assert answer.status_code < 500, (case.as_curl_command(), answer.text)

    check()
