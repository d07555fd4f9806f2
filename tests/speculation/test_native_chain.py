"""Chains of the bundled pair drafted in one native call equal those drafted token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.engine import Engine
from engine.linear.packed import kernel_fault
from models.bundled import BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig, Verification
from speculation.draft_model import DraftModel
from speculation.speculator import BatchSpeculator

MODELS = Path(BUNDLED_MODEL).parent

pytestmark = pytest.mark.skipif(
    kernel_fault(torch.device("cpu"), torch.bfloat16) is not None, reason="no native decoder on this host"
)


def engine_with(verification: Verification, draft: Path = MODELS / "tandem-code-1m") -> Engine:
    config = ServeConfig(
        model=str(BUNDLED_MODEL),
        dtype="bfloat16",
        device="cpu",
        kv_cache_memory_bytes=64 * 1024 * 1024,
        speculative_config=SpeculativeConfig(
            method="draft_model", model=str(draft), num_speculative_tokens=5, verification=verification
        ),
    )
    return Engine(config, speculate=BatchSpeculator)


@pytest.fixture(scope="module")
def engine(prompts: list[list[int]]) -> Engine:
    return warm(engine_with("coupled"), prompts)


@pytest.fixture(scope="module")
def by_chance(prompts: list[list[int]]) -> Engine:
    return warm(engine_with("standard"), prompts)


def warm(engine: Engine, prompts: list[list[int]]) -> Engine:
    """Put the prompts into the cache, so that every run has the same steps and the same drafts."""
    serve(engine, prompts, 0.0, 1.0)
    return engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:6]
    return [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]


def serve(
    engine: Engine, prompts: list[list[int]], temperature: float, top_p: float
) -> tuple[dict, int, int]:
    """Run prompts at once. Return their tokens, and how many were drafted and accepted."""
    for left in [*engine.sequences]:  # by a test that failed
        engine.abort(left)
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


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.3, 1.0)])
def test_coupled_drafts_are_the_same(
    engine: Engine,
    prompts: list[list[int]],
    temperature: float,
    top_p: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    natively = serve(engine, prompts, temperature, top_p)
    monkeypatch.setattr(drafter_of(engine)._drafting, "_native", None)
    assert serve(engine, prompts, temperature, top_p) == natively


def test_drafts_without_filters_are_nearly_the_same(
    engine: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _, accepted = serve(engine, prompts, 0.9, 0.9)
    monkeypatch.setattr(drafter_of(engine)._drafting, "_native", None)
    same_tokens, _, accepted_with_filters = serve(engine, prompts, 0.9, 0.9)
    assert tokens == same_tokens
    assert accepted > 0.85 * accepted_with_filters


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 0.7])
def test_drafts_for_rejection_sampling_are_the_same(
    by_chance: Engine,
    engine: Engine,
    prompts: list[list[int]],
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without temperature the output equals that of coupled verification."""
    natively = serve(by_chance, prompts, temperature, 1.0)
    monkeypatch.setattr(drafter_of(by_chance)._drafting, "_native", None)
    assert serve(by_chance, prompts, temperature, 1.0) == natively
    own, _, _ = serve(engine, prompts, temperature, 1.0)
    assert (natively[0] == own) == (temperature < 0.1)


def test_a_model_that_drafts_for_itself_is_always_accepted(prompts: list[list[int]]) -> None:
    """A wrong order of rows, places or noise would cause rejections."""
    engine = engine_with("standard", Path(BUNDLED_MODEL))
    _, drafted, accepted = serve(engine, prompts, 0.8, 1.0)
    assert accepted == drafted > 100
