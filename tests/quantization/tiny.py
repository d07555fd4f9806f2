"""Makes a model of two blocks whose layers fit groups of 32, and text for it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from tests.speculation.tiny_trained import VOCAB_SIZE, write_tiny_tokenizer

GROUP = 32
LENGTH = 32


def tiny_config(**changes: object) -> Qwen2Config:
    """Return a configuration with two query heads per KV head and biases in three projections."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "dtype": "float32",
    }
    return Qwen2Config(**(shape | changes))


def tiny_model(config: Qwen2Config | None = None) -> PreTrainedModel:
    """Return a model with unusual norms and biases and some large channels."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or tiny_config()).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
            if "norm" in name:
                parameter[::16] *= 8
    return model


def write_tiny(folder: Path, **changes: object) -> None:
    write_tiny_tokenizer(folder)
    tiny_model(tiny_config(**changes)).save_pretrained(folder)


def windows(count: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (count, LENGTH), generator=torch.Generator().manual_seed(1))
