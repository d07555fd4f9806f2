"""A model quantized at load gives the tokens of an engine with one request at a time: split, in a batch, with
drafts, after a prefix hit, and after a decode worker's death. bfloat16, with the kernels for quantized
weights.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deploy.config import load_config, speculative_config
from engine.engine import Engine
from engine.linear.packed import kernel_fault
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.e2e.serving import HttpServing

pytestmark = [
    pytest.mark.skipif(
        kernel_fault(torch.device("cpu"), torch.bfloat16) is not None,
        reason="this machine has no such kernel",
    )
]

NUM_TOKENS = 40
LINES = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text().splitlines()
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 11, "top_p": 0.95},
    {"temperature": 0, "speculative": {"method": "ngram"}},
    {"temperature": 1.0, "seed": 3, "speculative": {"method": "ngram"}},
    {"temperature": 0, "speculative": {"enabled": False}},
    {"temperature": 0.9, "seed": -5, "speculative": {"enabled": False}},
]
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 1024,
    "dtype": "bfloat16",
    "compile": "auto",  # as served: uncompiled modules sometimes round differently
}
ALWAYS = {"ignore_eos": True, "return_token_ids": True}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4, "quantization": "int8"}


def prompt(number: int) -> str:
    text: str = json.loads(LINES[number])["prompt"]
    return text[-150 * (number % 3 + 1) :]


def alone(weights: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of an engine with one request at a time and no drafts."""
    settings = OPTIONS | weights | {"enable_prefix_caching": False}
    engine = Engine(load_config({"model": str(BUNDLED_MODEL)} | settings, environ={}))
    answers: list[list[int]] = []
    for number, (fields, token_ids) in enumerate(zip(REQUESTS, prompts, strict=True)):
        sampling = {name: value for name, value in fields.items() if name != "speculative"}
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=token_ids, sampling=params))
        answers.append([])
        while engine.has_work():
            for output in engine.step().outputs:
                answers[-1] += output.token_ids
    return answers


def ask(serving: HttpServing, number: int) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt and of its answer."""
    body = {"prompt": prompt(number), "max_tokens": NUM_TOKENS, **ALWAYS, **REQUESTS[number]}
    answer = serving.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["prompt_token_ids"], choice["token_ids"]


@pytest.mark.parametrize(
    "weights", [{"quantization": "int8"}, {"quantization": "int4", "quantize_lm_head": True}], ids=str
)
def test_the_same_tokens_however_it_is_served(weights: dict[str, Any]) -> None:
    drafts = speculative_config(DRAFT, "--speculative-config", str(BUNDLED_MODEL))
    workers = {"prefill-0": "", "decode-0": "KILL:after:after_step:4", "decode-1": ""}
    numbers = range(len(REQUESTS))
    with (
        HttpServing(BUNDLED_MODEL, workers, speculative_config=drafts, **weights, **OPTIONS) as serving,
        ThreadPoolExecutor(len(REQUESTS)) as pool,
    ):
        answers = [pool.submit(ask, serving, number) for number in numbers]
        serving.bury("decode-0")
        crowd = [answer.result(30) for answer in answers]
        assert serving.metric("tandem_requests_placed_again_total") > 0
        again = [ask(serving, number) for number in numbers]
        for method in ("draft_model", "ngram"):
            assert serving.metric("tandem_spec_decode_num_accepted_tokens_total", method=method) > 0, method
        serving.wait_empty()
    expected = alone(weights, [token_ids for token_ids, _ in crowd])
    assert [token_ids for _, token_ids in crowd] == expected
    assert [token_ids for _, token_ids in again] == expected
    assert len({token for tokens in expected for token in tokens}) > NUM_TOKENS, "a test that cannot fail"
