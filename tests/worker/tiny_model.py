"""Writes a small random Llama, and generates with it by Transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

VOCAB_SIZE = 300


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(1, VOCAB_SIZE), k=length)


def write_tiny_llama(folder: Path, seed: int = 7, **changes: Any) -> None:
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rest = {"max_position_embeddings": 1024, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(**{**shape, **heads, **rest, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def load(folder: Path) -> PreTrainedModel:
    """Load with Transformers' own attention. Torch's, the default in 5.17, leaves out Gemma 2's soft caps."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def assert_greedy(model: PreTrainedModel, prompt: list[int], found: list[int], num_tokens: int) -> None:
    """Check length and likeliest tokens of `found` with one forward; `greedy` takes one for each token."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + found]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert len(found) == num_tokens and found == best, f"{found} instead of {best}"


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the reference's continuation, which no end-of-text token stops."""
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()
