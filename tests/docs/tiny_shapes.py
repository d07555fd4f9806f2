"""Makes a small configuration of any causal model that Transformers has, by its fields' names."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.e2e.architectures import ARCHITECTURES, VOCAB_SIZE, config_of

_SMALL: dict[tuple[str, ...], Any] = {
    ("vocab_size", "vocab_size_per_layer_input"): VOCAB_SIZE,
    ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width"): 64,
    ("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size", "hidden_size_mlp"): 96,
    ("ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"): 96,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"): 4,
    ("num_attention_heads", "n_head", "n_heads", "num_heads"): 4,
    ("decoder_attention_heads", "encoder_attention_heads"): 4,
    ("num_key_value_heads",): 2,
    ("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "hidden_size_per_layer_input"): 16,
    ("q_lora_rank", "qk_head_dim"): 24,
    ("qk_rope_head_dim", "rotary_dim", "laurel_rank"): 8,
    ("global_head_dim",): 32,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"): 512,
    (
        "sliding_window",
        "sliding_window_size",
        "attention_window_size",
        "local_window_size",
        "window_size",
    ): 24,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"): 2,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 48,
    ("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"): 1,
    ("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head", "mamba_head_dim"): 16,
    ("mamba_n_heads", "mamba_num_heads"): 8,
    ("mamba_d_ssm",): 128,
    ("depth",): 2,
    ("n_groups", "mamba_n_groups"): 1,
    ("linear_num_key_heads", "linear_num_value_heads"): 2,
    ("linear_key_head_dim", "linear_value_head_dim", "index_head_dim"): 16,
    ("num_kv_shared_layers", "index_n_heads"): 2,
    ("index_topk",): 4,
    ("initializer_range",): 0.3,
    ("bos_token_id",): 0,
    ("eos_token_id",): 1,
    ("pad_token_id",): 2,
    ("tie_word_embeddings",): False,
    ("is_decoder",): True,
}
"""Maps fields to the value that each gets where a configuration has it."""

_LATENT_EXPERTS = {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
_SHARING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR_FIRST = ["linear_attention", "full_attention"] * 2
_COMPRESSED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "hc_lowrank": 16,
}

_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _LINEAR_FIRST, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT_EXPERTS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_unified_text": _SHARING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR_FIRST, "linear_num_heads": 2, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "moshi": {"sliding_window": 512},  # its caches apply the window, its masks do not
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {  # else `generate` clamps time steps in prompts alone
        "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"],
        "time_step_min": 1e-9,
    },
    "qwen4_exp_text": _COMPRESSED,
    "reformer": {"axial_pos_embds": False},
    "xlm": {"emb_dim": 64, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields of single model types, which add to the common ones or replace them."""

_GRID_ROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_OWN |= {
    "cosmos3_edge_text": {"rope_parameters": _GRID_ROPE},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48]},
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "glm4v_text": {"rope_parameters": _GRID_ROPE},
    "glm5_next_text": {"index_topk": 32, "qk_rope_head_dim": 0},
    "granite_docling_vision": {"out_hidden_size": 64},
    "glm_ocr_text": {"rope_parameters": _GRID_ROPE},
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "inkling2_vision": {"text_hidden_size": 64},
    "muse_spark_audio": {"out_hidden_size": 64, "hidden_sizes": [16] * 4},
    "paddleocr_vl_text": {"rope_parameters": _GRID_ROPE},
    "qwen2_5_omni_text": {"rope_parameters": _GRID_ROPE},
    "qwen2_5_vl_text": {"rope_parameters": _GRID_ROPE},
    "qwen2_vl_text": {"rope_parameters": _GRID_ROPE},
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"sliding_window": 24, "share_expert_dim": 48},
}
"""Shapes that the text model shares with the model's other parts."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a small configuration. Raises what Transformers raises for shapes that do not fit together."""
    if model_type in ARCHITECTURES:
        return config_of(model_type)
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    fields = {
        name: {"model_type": part.model_type, **_fields(part)}
        for name, part in parts.items()
        if isinstance(part, PreTrainedConfig)
    }
    return kind(**fields | _fields(default))


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    stored = config.to_dict()
    fields = {
        name: value for names, value in _SMALL.items() for name in names if stored.get(name) is not None
    }
    if fields.get("qk_rope_head_dim"):  # multi-head latent attention
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        if fields.get("head_dim"):
            fields["head_dim"] = fields["qk_rope_head_dim"]
    model_type = config.model_type
    return fields | ARCHITECTURES.get(model_type, {}) | _OWN.get(model_type, {})
