"""Drafting on decode workers after a hand-off. The bundled pair, fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from tests.worker.harness import Cluster, RunningWorker, tiny_config

MODELS = Path(BUNDLED_MODEL).parent
NUM_PROMPTS = 2
NUM_TOKENS = 48
TEMPERATURES = (0.0, 0.8)


def speculating(**options: Any) -> SpeculativeConfig:
    fields = {"method": "draft_model", "model": str(MODELS / "tandem-code-1m"), "num_speculative_tokens": 4}
    return SpeculativeConfig(**(fields | options))


def config(speculative: SpeculativeConfig | None, **changes: Any) -> ServeConfig:
    native = {"kv_cache_memory_bytes": 48 * 1024 * 1024, "compile": "auto"}
    return tiny_config(Path(BUNDLED_MODEL), speculative_config=speculative, **native, **changes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:NUM_PROMPTS]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def asked(name: str, prompt: list[int], temperature: float) -> EngineRequest:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=5, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


def tokens_of(
    cluster: Cluster, round_: str, prompts: list[list[int]], worker: RunningWorker, decode: Any = None
) -> list[list[int]]:
    """Run one request after the other, since drafts depend on the room that others leave."""
    names = []
    for temperature in TEMPERATURES:
        for index, prompt in enumerate(prompts):
            names.append(f"{round_}/{temperature}/{index}")
            cluster.generate(worker, asked(names[-1], prompt, temperature), decode)
            cluster.run(names[-1])
    return [cluster.tokens(name) for name in names]


def used(cluster: Cluster, round_: str) -> tuple[int, int]:
    """Return the drafted and accepted tokens of all requests of a round."""
    outputs = [
        output
        for name, found in cluster.outputs.items()
        if name.startswith(round_ + "/")
        for _, output in found
    ]
    return sum(output.drafted_tokens for output in outputs), sum(output.accepted_tokens for output in outputs)


def acceptance(cluster: Cluster, round_: str) -> float:
    drafted, accepted = used(cluster, round_)
    return accepted / drafted


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    with Cluster() as cluster:
        worker = cluster.start("decode", "decode-0", config(None))
        return tokens_of(cluster, "plain", prompts, worker)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], plain: list[list[int]]) -> float:
    """Return the acceptance of a draft model's tokens where the prompt was computed."""
    with Cluster() as cluster:
        worker = cluster.start("decode", "decode-0", config(speculating()))
        assert tokens_of(cluster, "alone", prompts, worker) == plain
        return acceptance(cluster, "alone")


@pytest.mark.parametrize(("prefill", "transport"), [("carry", "tcp"), ("rebuild", "shm")])
def test_acceptance_is_the_same_after_a_hand_off(
    prompts: list[list[int]], plain: list[list[int]], alone: float, prefill: str, transport: str
) -> None:
    with Cluster() as cluster:
        pair = cluster.start_pair(config(speculating(prefill=prefill), kv_transports=transport))
        for round_ in ("first", "again"):  # the second round finds the prompts' blocks, with their draft KV
            assert tokens_of(cluster, round_, prompts, pair[0], pair[1].address) == plain
            assert acceptance(cluster, round_) == pytest.approx(alone, rel=0.02)
        if prefill == "carry":  # then the first step after the hand-off drafts, too
            outputs = [found for name, found in cluster.outputs.items() if name.startswith("first/")]
            assert {found[1][1].drafted_tokens for found in outputs} == {4}
        cluster.wait_empty(*pair)
