"""Chains drafted in one native call against those drafted token by token. The bundled pair, bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.engine import Engine
from engine.linear.packed import kernel_fault
from protocol.config import BUNDLED_MODEL, ServeConfig
from protocol.messages import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.draft_model import DraftModel
from speculation.speculator import speculate

MODELS = Path(BUNDLED_MODEL).parent

pytestmark = pytest.mark.skipif(
    kernel_fault(torch.device("cpu"), torch.bfloat16) is not None, reason="no native decoder on this host"
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = ServeConfig(
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory_bytes=64 * 1024 * 1024,
        speculative_config=SpeculativeConfig(
            method="draft_model", model=str(MODELS / "tandem-code-1m"), num_speculative_tokens=5
        ),
    )
    return Engine(config, speculate=speculate)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:6]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def serve(
    engine: Engine, prompts: list[list[int]], temperature: float, top_p: float
) -> tuple[dict, int, int]:
    """All prompts at once, of unlike lengths of output: tokens, and how many were drafted and accepted."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=20 + 3 * index, temperature=temperature, top_p=top_p, seed=-index, ignore_eos=True
        )
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    tokens: dict[str, list[int]] = {}
    drafted = accepted = 0
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            drafted += output.drafted_tokens
            accepted += output.accepted_tokens
    return tokens, drafted, accepted


def drafter_of(engine: Engine) -> DraftModel:
    drafter = engine._speculator._drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 1.0), (1.3, 1.0)])
def test_the_same_drafts(
    engine: Engine,
    prompts: list[list[int]],
    temperature: float,
    top_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    natively = serve(engine, prompts, temperature, top_p)
    monkeypatch.setattr(drafter_of(engine), "_native", None)
    assert serve(engine, prompts, temperature, top_p) == natively


def test_nearly_the_same_where_filters_are_left_out(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _, accepted = serve(engine, prompts, 0.9, 0.9)
    monkeypatch.setattr(drafter_of(engine), "_native", None)
    same_tokens, _, accepted_with_filters = serve(engine, prompts, 0.9, 0.9)
    assert tokens == same_tokens
    assert accepted > 0.85 * accepted_with_filters
