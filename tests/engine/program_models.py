"""Small models of every family that has a program, with differences from the family's usual small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.e2e.architectures import GEMMA4_EXPERTS, VOCAB_SIZE, write_model

ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 32},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
}
"""By name, which begins with the model type unless given."""

_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_in_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.7,
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.6, 1.4, 0.7, 1.3, 0.8],
    "ssm_out_multiplier": 0.4,
    "mlp_multipliers": [0.7, 1.4],
    "lm_head_multiplier": 0.3,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {"num_experts": 6, **_FEW},
    "lfm2": {"conv_bias": True},
    "bamba": {"time_step_limit": (0.5, 1.5)},
    "granitemoehybrid": {"num_local_experts": 0, "residual_multiplier": 0.4, "logits_scaling": 4.0},
    "granite-experts": {"model_type": "granitemoehybrid", "residual_multiplier": 0.4},
    "lfm2_moe": {
        "num_experts": 6,
        **_FEW,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h": {"time_step_min": 0.5},
    "nemotron-experts": {
        "model_type": "nemotron_h",
        "layer_types": ["linear_attention", "full_attention", "moe", "mlp"],
        "n_routed_experts": 8,
        **_FEW,
        "n_group": 4,
        "topk_group": 2,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
    },
    "kimi_linear": {**_FEW, "num_experts": 8, "num_expert_group": 4, "topk_group": 2},
    "kimi_linear-whole_queries": {
        "model_type": "kimi_linear",
        "mlp_layer_types": ["dense"] * 3,
        "q_lora_rank": None,
        "rms_norm_eps": 4.0,  # the norm of latents has its own
    },
    "falcon_h1": _MULTIPLIED | {"mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True},
    "falcon_h1-normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1-normed-first": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
}

LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v3-whole_queries": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "first_k_dense_replace": 9,
        "rms_norm_eps": 4.0,  # the norm of latents has its own
    },
}

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "global_head_dim": 32,
    "final_logit_softcapping": 30.0,
}
_VALUES_OF_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
GEMMA4: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        **_GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text-large": {**_GEMMA4, **_VALUES_OF_KEYS, "hidden_size_per_layer_input": 0},
    "gemma4_text-experts": GEMMA4_EXPERTS,
    "gemma4_unified_text": {**_GEMMA4, **_VALUES_OF_KEYS},
}
"""Models that the native decoder does not run: Gemma 4 with vectors of tokens for each layer and with layers
that share KV, as E2B, and with values made of keys, as 31B and 12B.
"""
NARROW = {"qwen2-narrow_heads": {"head_dim": 12}}
"""A size of heads that is no power of two, so that lanes of GPU kernels have no value."""
MODELS = ATTENTION | RECURRENT | LATENT | GEMMA4 | NARROW


def write(name: str, folder: Path) -> None:
    """Write a model whose norms, biases and other vectors have an effect."""
    write_model(folder=folder, **{"model_type": name.split("-")[0]} | MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(folder)
    preferences = [each for name, each in model.named_buffers() if name.endswith("bias")]  # of routers
    for weight in (*model.parameters(), *preferences):
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    model.save_pretrained(folder)
