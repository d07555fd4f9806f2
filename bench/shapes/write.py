"""`tandem bench shapes`: models with random weights as Transformers folders, which any engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_COMMON = {"vocab_size": 4096, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 0}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-29m": {  # launch overhead and scheduling dominate
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "tie_word_embeddings": False,
    },
    "qwen3-0.5b": {  # reading the weights dominates
        "model_type": "qwen3",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3.5-0.5b": {  # 18 gated delta nets and 6 attention layers, like the smallest Qwen3.5
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
}


def write_shape(name: str, folder: Path, seed: int = 0) -> int:
    """Write shape `name` with random bf16 weights and a tokenizer to `folder`. Return its parameter count.

    Raises ValueError if the name is unknown.
    """
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bench.shapes.tokenizer import save_tokenizer

    config = AutoConfig.for_model(**SHAPES[name], **_COMMON)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.bos_token_id = config.bos_token_id
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size, config.max_position_embeddings)
    return sum(parameter.numel() for parameter in model.parameters())


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(SHAPES)}")],
    folder: Annotated[Path, typer.Argument(help="where to write the model")],
    seed: Annotated[int, typer.Option(help="seed of the random weights")] = 0,
) -> None:
    """Write a model folder with random weights and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{name}: {write_shape(name, folder, seed) / 1e6:.1f} M parameters in {folder}")
