"""Makes real engines on the CPU that speculate with a draft model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation, SpeculativeConfig
from speculation.control import estimator
from speculation.speculator import BatchSpeculator

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "tandem-code-10m", MODELS / "tandem-code-1m"


def make_engine(
    model: Path, draft: Path | None, max_num_seqs: int = 8, **options: Any
) -> tuple[Engine, BatchSpeculator]:
    """Make an engine. Without a `draft` it does not speculate."""
    speculative = SpeculativeConfig(method="draft_model", model=str(draft), **options)
    config = ServeConfig(
        model=str(model),
        dtype="float32",
        device="cpu",
        compile="auto",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=16 << 20,
        speculative_config=speculative if draft is not None else None,
    )
    engine = Engine(config, speculate=BatchSpeculator)
    speculator = engine._speculator
    assert isinstance(speculator, BatchSpeculator)
    return engine, speculator


def ask(
    request_id: str, prompt: list[int], max_tokens: int = 24, temperature: float = 0.0, **speculation: Any
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=3),
        speculation=RequestSpeculation(**speculation) if speculation else None,
    )


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until all requests end. Return their tokens by request."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every step the same measured time, on any machine."""
    now = itertools.count()
    monkeypatch.setattr(estimator.time, "perf_counter", lambda: next(now) * 1e-3)
