"""Writes small random models of every supported architecture as local folders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 320
SLIDING_WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

_ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
}

_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # the rotated part
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}

_UNTIED = {"tie_word_embeddings": False}  # else these repeat one token, whatever attention computes

# Fields that differ from the common shape, by model type.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "mixtral": {**_MOE, "sliding_window": None},
    "gemma": {},
    "gemma2": {
        **_UNTIED,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        **_UNTIED,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": SLIDING_WINDOW},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "cohere": {},
    "stablelm": {"partial_rotary_factor": 0.25},
    "glm4": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": SLIDING_WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"rotary_pct": 0.25},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mimo_v2_flash": {
        **_MOE,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "num_key_value_heads": 1,  # layers with a window have twice as many
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": SLIDING_WINDOW,
    },
    "gemma3n_text": {
        **_UNTIED,
        **_ALTERNATING,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        **_UNTIED,
        **_ALTERNATING,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "deepseek_v3": {
        **_MOE,
        **_LATENT,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {**_MOE, "sliding_window": SLIDING_WINDOW, "initializer_range": 0.5},
}

GEMMA4_EXPERTS: dict[str, Any] = {
    **_UNTIED,
    **_ALTERNATING,
    **_MOE,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
"""Gemma 4 with experts beside MLPs, as 26B-A4B."""

_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}

_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MOE, **_LINEAR, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {
        **_MOE,
        **_LINEAR,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 48,
    },
    "olmo_hybrid": _LINEAR,
    "falcon_h1": _MAMBA,  # both kinds in each layer
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MOE,
        **_MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 48,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 32,
        # else `generate` differs from its own whole forward, which alone applies the limit
        "time_step_min": 1e-9,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "kimi_linear": {
        **_MOE,
        **_LATENT,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "moe_intermediate_size": 48,
    },
    "jamba": {**_MOE, "mamba_d_state": 8, "attn_layer_period": 3, "attn_layer_offset": 1},
    "minimax": {**_MOE, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
}
"""Models with recurrent layers."""


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Return a random text. The same length and seed give the same one."""
    return random.Random(length if seed is None else seed).choices(range(3, VOCAB_SIZE), k=length)


def config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    common = _COMMON
    if model_type == "gpt2":
        names = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
        common = {name: _COMMON[name] for name in names}
    return AutoConfig.for_model(
        model_type, **{**common, **(ARCHITECTURES | HYBRIDS).get(model_type, {}), **changes}
    )


def write_model(model_type: str, folder: Path, **changes: Any) -> None:
    """Write a model with weights large enough that its greedy tokens vary.

    States of recurrent layers last for dozens of tokens. With the usual initialization they would fade within
    one.
    """
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **changes), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.uniform_(-5, -2)
    model.save_pretrained(folder)
