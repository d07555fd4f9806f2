"""Models that are refused at load: a small shape of each, and a word of the reason."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

RECURRENT: dict[str, Any] = {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 16}

_BY_TYPE: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", RECURRENT, "mamba2"),
    ("bloom", {"n_layer": 2, "n_head": 2}, "bloom"),
    ("t5", {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "encoder-decoder"),
    ("rwkv", {"attention_hidden_size": 32}, "rwkv: layers .*recurrent state"),
    (
        "llama4_text",
        {"attention_chunk_size": 8, "num_local_experts": 2},
        "--max-model-len to at most 8, not 64",
    ),
    (
        "deepseek_v32",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "index_topk": 4},
        "indexer .*index_topk",
    ),
]

REFUSED = [(model_type, {**TINY, **changes}, reason) for model_type, changes, reason in _BY_TYPE]
