"""Writes the shapes used in comparisons as local Transformers folders, which any engine can load."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from bench.shapes.tokenizer import save_tokenizer

VOCAB_SIZE = 4096
MAX_POSITION = 4096
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama_29m() -> LlamaConfig:
    """Return a Llama of 29 M parameters: launch overhead and scheduling dominate."""
    return LlamaConfig(
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        tie_word_embeddings=False,
        **_COMMON,
    )


def qwen3_05b() -> Qwen3Config:
    """Return a Qwen3 of 0.5 B parameters: reading the weights dominates."""
    return Qwen3Config(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        **_COMMON,
    )


def qwen35_05b() -> Qwen3_5TextConfig:
    """Return a Qwen3.5 of 0.5 B parameters: 18 gated delta nets and 6 attention layers, like its smallest
    model.
    """
    return Qwen3_5TextConfig(
        num_hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        intermediate_size=3584,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        **_COMMON,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-29m": llama_29m,
    "qwen3-0.5b": qwen3_05b,
    "qwen3.5-0.5b": qwen35_05b,
}


def write_shape(name: str, folder: Path, seed: int = 0) -> int:
    """Write shape `name` with random bf16 weights and a tokenizer to `folder`. Return its parameter count.

    Raises ValueError if the name is unknown.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    config = SHAPES[name]()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.bos_token_id = config.bos_token_id
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size, config.max_position_embeddings)
    return sum(parameter.numel() for parameter in model.parameters())
