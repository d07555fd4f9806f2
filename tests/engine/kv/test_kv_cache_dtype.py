"""Engines with `--kv-cache-dtype`: more tokens fit, and no block is shared with another format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.engine.test_engine import Make, prompt_of, run, tokens

NUM_TOKENS = 24
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((200, 37, 64, 90))]
CODED = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
ALLOWED = [5, 6, 7, 8]
"""Few allowed tokens, so that the tiny model repeats itself and drafts are accepted."""


@pytest.fixture
def make_engine(folder: Path) -> Make:
    bounds = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20} | bounds

    def make(**options: Any) -> Engine:
        config = ServeConfig(model=str(folder), device="cpu", **(settings | options))
        return Engine(config, speculate=BatchSpeculator)

    return make


def ask(index: int, given: Sequence[int] = ()) -> EngineRequest:
    """Make request `index`, of which a lost worker emitted these output tokens before."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.5, seed=index, ignore_eos=True, allowed_token_ids=ALLOWED
    )
    return EngineRequest(
        request_id=f"r{index}", prompt_token_ids=PROMPTS[index], sampling=params, output_token_ids=list(given)
    )


def alone(engine: Engine, index: int, given: Sequence[int] = ()) -> tuple[list[int], int]:
    """Return its tokens, and how many of its prompt were cached."""
    engine.add(ask(index, given))
    outputs = run(engine)[f"r{index}"]
    return tokens(outputs), outputs[0].cached_tokens or 0


@CODED
def test_tokens_do_not_depend_on_how_they_are_computed(make_engine: Make, kv_cache_dtype: str) -> None:
    plain = make_engine(kv_cache_dtype=kv_cache_dtype)
    expected = [alone(plain, index)[0] for index in range(len(PROMPTS))]
    assert expected != [alone(make_engine(), index)[0] for index in range(len(PROMPTS))]
    assert alone(plain, 0) == (expected[0], 192)  # of its prefix
    batched = make_engine(kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=24)
    for index in range(len(PROMPTS)):
        batched.add(ask(index))
    outputs = run(batched)
    assert [tokens(outputs[f"r{index}"]) for index in range(len(PROMPTS))] == expected
    taken_up = make_engine(kv_cache_dtype=kv_cache_dtype)
    assert alone(taken_up, 0, expected[0][:10])[0] == expected[0][10:]
    by_torch = make_engine(kv_cache_dtype=kv_cache_dtype, attention_backend="torch", compile="off")
    assert len(alone(by_torch, 1)[0]) == NUM_TOKENS


@CODED
def test_tokens_do_not_depend_on_the_drafts(make_engine: Make, folder: Path, kv_cache_dtype: str) -> None:
    plain = make_engine(kv_cache_dtype=kv_cache_dtype)
    expected = [alone(plain, index)[0] for index in range(len(PROMPTS))]
    for options in ({"method": "ngram"}, {"method": "draft_model", "model": str(folder), "tree": True}):
        asked = SpeculativeConfig(num_speculative_tokens=4, **options)
        drafting = make_engine(kv_cache_dtype=kv_cache_dtype, speculative_config=asked)
        for index in range(len(PROMPTS)):
            drafting.add(ask(index))
        outputs = run(drafting)
        assert [tokens(outputs[f"r{index}"]) for index in range(len(PROMPTS))] == expected
        assert sum(each.accepted_tokens for several in outputs.values() for each in several) > 0
        assert {info.name: info.quantization for info in drafting.pool.segments}.get(
            "draft", "none"
        ) == "none"


@CODED
def test_more_tokens_fit_and_the_format_has_its_own_name(make_engine: Make, kv_cache_dtype: str) -> None:
    engine, plain = make_engine(kv_cache_dtype=kv_cache_dtype), make_engine()
    # A head's 16 values are 32 bytes, or 16 and a scale.
    assert engine.blocks.num_blocks == plain.blocks.num_blocks * 32 // 20
    assert engine.cache_format.kv_format == plain.cache_format.kv_format.replace(
        "bfloat16", f"bfloat16:{kv_cache_dtype}_row_scales"
    )
    for each in (engine, plain):
        each.add(ask(0))
        run(each)
    assert not engine.blocks.tables[0].entries.keys() & plain.blocks.tables[0].entries.keys()


def test_unsupported_head_sizes_are_refused_by_name(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=36, intermediate_size=32, num_hidden_layers=1, num_attention_heads=6
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype: int8: 6 values in a head are not a multiple of 4"
    ):
        Engine(ServeConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="int8"))
