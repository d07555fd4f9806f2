"""Writes a tiny model and a similar draft model, and runs requests on an engine to their end."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.worker.tiny_model import VOCAB_SIZE, load, write_tiny_llama

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
"""The size of the tiny model's own KV block. A draft segment of the same shape doubles it."""

MAX_LEN = 256
CHUNK = 64
"""The tokens of one step."""


INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_interpreted_kernels.py runs it"
)
"""Marks tests that launch Triton kernels on a CPU, by Triton's interpreter."""


def write_pair(target: Path, draft: Path) -> None:
    """Write a tiny Llama, and a copy with noise in its weights that often agrees with it, but not always."""
    write_tiny_llama(target)
    write_noisy(target, draft)


def write_noisy(target: Path, draft: Path, difference: float = 0.02) -> None:
    """Write a copy of the model with noise in its weights."""
    model = load(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += difference * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(draft)


def small_config(model: Path, num_blocks: int = 128, **options: Any) -> ServeConfig:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "compile": "off",
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES,
    }
    return ServeConfig(model=str(model), **(settings | options))


def native_config(model: Path, num_blocks: int = 128, **options: Any) -> ServeConfig:
    """Return the configuration of an engine whose steps take a tenth of the time, where there are kernels."""
    return small_config(model, num_blocks, **({"compile": "auto"} | options))


def drafting(config: ServeConfig, **options: Any) -> Engine:
    """Make an engine with these options of the `SpeculativeConfig`."""
    asked = SpeculativeConfig(**options)
    return Engine(replace(config, speculative_config=asked), speculate=BatchSpeculator)


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocab_size) for _ in range(length)]


def ask(request_id: str, prompt: list[int], max_tokens: int = 24, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params)


def run(engine: Engine, requests: Sequence[EngineRequest] = ()) -> dict[str, TokenOutput]:
    """Return each request's outputs as one: tokens, log-probabilities, finish reason and drafts."""
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.blocks.available == engine.blocks.num_blocks
    return {request_id: joined(parts) for request_id, parts in outputs.items()}


def joined(parts: list[TokenOutput]) -> TokenOutput:
    last = parts[-1]
    assert all(part.finish_reason is None for part in parts[:-1])
    return TokenOutput(
        request_id=last.request_id,
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs or []] or None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        drafted_tokens=sum(part.drafted_tokens for part in parts),
        accepted_tokens=sum(part.accepted_tokens for part in parts),
    )


def tokens(outputs: dict[str, TokenOutput]) -> dict[str, list[int]]:
    return {request_id: output.token_ids for request_id, output in outputs.items()}


def drafted_and_accepted(outputs: dict[str, TokenOutput]) -> tuple[int, int]:
    found = outputs.values()
    return sum(each.drafted_tokens for each in found), sum(each.accepted_tokens for each in found)
