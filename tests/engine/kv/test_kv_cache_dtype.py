"""Engines with `--kv-cache-dtype`: more tokens fit, and no block is shared with another format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from tests.engine.kv.test_tiers_engine import written
from tests.engine.test_engine import Make, prompt_of, run, tokens

NUM_TOKENS = 24
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((200, 37, 64, 90))]
CODED = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
ALLOWED = [5, 6, 7, 8]
"""Few allowed tokens, so that the tiny model repeats itself and drafts are accepted."""


@pytest.fixture
def make_engine(folder: Path) -> Iterator[Make]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 256,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 20,
        }
        config = ServeConfig(model=str(folder), device="cpu", **(settings | options))
        engines.append(Engine(config, speculate=BatchSpeculator))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(index: int, given: Sequence[int] = ()) -> EngineRequest:
    """Make request `index`, of which a lost worker emitted these output tokens before."""
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.5, seed=index, ignore_eos=True, allowed_token_ids=ALLOWED
    )
    return EngineRequest(
        request_id=f"r{index}",
        prompt_token_ids=PROMPTS[index],
        sampling=params,
        output_token_ids=list(given),
    )


def alone(engine: Engine, index: int, given: Sequence[int] = ()) -> tuple[list[int], int]:
    """Return its tokens, and how many of its prompt were cached."""
    engine.add(ask(index, given))
    outputs = run(engine)[f"r{index}"]
    return tokens(outputs), outputs[0].cached_tokens or 0


def settled(engine: Engine, index: int) -> tuple[list[int], int]:
    """Return the same as `alone`, then wait until evicted blocks are on the disk, so that later hits do not
    depend on its speed.
    """
    answer = alone(engine, index)
    written(engine)
    return answer


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
def test_blocks_come_back_from_host_and_disk(make_engine: Make, tmp_path: Path, kv_cache_dtype: str) -> None:
    block_bytes = make_engine(kv_cache_dtype=kv_cache_dtype).pool.memory.shape[1]
    tight = {
        "kv_cache_dtype": kv_cache_dtype,
        "kv_cache_memory_bytes": 20 * block_bytes,
        "kv_offloading_size": 16 * block_bytes / 2**30,
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": 1 / 1024,
    }
    engine = make_engine(**tight)
    expected = [settled(engine, index)[0] for index in range(len(PROMPTS))]
    assert [settled(engine, index) for index in range(len(PROMPTS))] == [
        (expected[0], 192),
        (expected[1], 32),
        (expected[2], 63),
        (expected[3], 80),
    ]
    engine.close()
    again = make_engine(**tight)
    found = [alone(again, index) for index in range(len(PROMPTS))]
    assert [tokens for tokens, _ in found] == expected
    assert sum(cached for _, cached in found) > 100  # from the earlier worker's blocks on the disk


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
