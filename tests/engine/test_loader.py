"""What the engine refuses to load, and how it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import UnsupportedModelError
from engine.loader import load_model
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from tests.worker.tiny_model import write_tiny_llama

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 32, "head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 16},
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
}


def config_for(folder: Path, **changes: Any) -> ServeConfig:
    return msgspec.structs.replace(
        ServeConfig(model=str(folder), device="cpu", dtype="float32", load_format="dummy"), **changes
    )


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba2", RECURRENT["mamba2"], "mamba2"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 2}, "sinks"),
        ("bloom", {"n_layer": 2, "n_head": 2}, "bloom"),
        (
            "deepseek_v3",
            {
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 12,
            }
            | {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            "head_dim|MLA",
        ),
        ("t5", {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "encoder-decoder"),
        ("qwen3_next", RECURRENT["qwen3_next"], r"recurrent state|linear|qwen3_next"),
    ],
)
def test_refuses_by_name(tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str) -> None:
    AutoConfig.for_model(model_type, **{**TINY, **changes}).save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, ConfigError), match=reason):
        load_model(config_for(tmp_path))


def test_missing_folder_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        load_model(config_for(tmp_path / "nowhere"))


def test_max_model_len_beyond_the_model_names_the_flag(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="--max-model-len: 2000 exceeds the model's 1024"):
        load_model(config_for(tmp_path, max_model_len=2000))


def test_dummy_weights_are_equal_in_every_process(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    torch.manual_seed(1)
    first = load_model(config_for(tmp_path))
    torch.manual_seed(2)
    second = load_model(config_for(tmp_path))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_facts_of_a_model(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    loaded = load_model(config_for(tmp_path, load_format="auto"))
    assert (loaded.kv_shape.num_layers, loaded.kv_shape.num_kv_heads, loaded.kv_shape.head_dim) == (2, 2, 16)
    assert loaded.max_model_len == 1024
    assert loaded.eos_token_ids == [0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == loaded.vocab_size
