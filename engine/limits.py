"""Limits that follow from a model's shape. The launcher checks them before it loads anything, and workers
check them again. This module does not import torch.
"""

from __future__ import annotations

from typing import get_args

from engine.usable_memory import usable_memory
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import Quantization

CPU_POOL_LIMIT = 4 * 1024**3
"""Most bytes of a CPU pool, unless the user asks for more."""


def choose_max_model_len(requested: int | None, longest: int | None) -> int:
    """Return the most tokens of a sequence for a model with `longest` positions (None: unknown). Raise
    `ConfigError`, naming the option.
    """
    if longest is None:
        if requested is None:
            raise ConfigError(
                "--max-model-len: the model's config names no longest sequence; set this option"
            )
        return requested
    if requested is not None and requested > longest:
        raise ConfigError(f"--max-model-len: {requested} exceeds the model's {longest} positions")
    return requested or longest


def check_quantization(config: ServeConfig, method: str | None) -> None:
    """Raise `ConfigError` unless --quantization fits the checkpoint's own `method` (None: not quantized)."""
    asked = config.quantization
    if asked is None or asked == method:
        return
    if method is not None:
        raise ConfigError(
            f"--quantization: {config.model} is already quantized by {method}: remove "
            "this option, or use the model that it was made from"
        )
    if asked not in get_args(Quantization):
        raise ConfigError(
            f"--quantization: {config.model} is not quantized by {asked}; to round its weights at load, "
            f"write one of {', '.join(get_args(Quantization))}"
        )


def check_draft(vocab_size: int, longest: int, target_vocab_size: int, max_model_len: int) -> None:
    """Raise `ConfigError` if the draft model lacks some of the target's token ids or positions."""
    if vocab_size < target_vocab_size:
        raise ConfigError(
            f"--speculative-config: model: the draft's vocabulary has {vocab_size} tokens, "
            f"the model's {target_vocab_size}; they must share a tokenizer"
        )
    if longest < max_model_len:
        raise ConfigError(
            f"--speculative-config: model: the draft takes {longest} tokens; "
            f"--max-model-len is {max_model_len}"
        )


def cpu_pool_budget(config: ServeConfig, max_model_len: int, sequence_bytes: int) -> tuple[int, str]:
    """Return the bytes of a CPU worker's pool and the reason for this size. `sequence_bytes`: the bytes of
    one sequence of `max_model_len` tokens.
    """
    if config.kv_cache_memory_bytes is not None:
        total = usable_memory().total
        if (asked := config.kv_cache_memory_bytes) > total:
            raise ConfigError(f"--kv-cache-memory-bytes: {asked} are asked for, this host has {total}")
        return asked, "--kv-cache-memory-bytes"
    share = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
    fair = int(usable_memory().available * config.gpu_memory_utilization / 2)
    # Few sequences get that long: the prefix cache uses the rest.
    sequences = config.max_num_seqs
    return min(
        (sequences * sequence_bytes, f"room for {sequences} sequences of {max_model_len} tokens"),
        (CPU_POOL_LIMIT, "the most that a CPU worker takes by default"),
        (fair, f"half of {share} of the free memory"),
    )
