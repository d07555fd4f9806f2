"""The architectures of GGUF files that are read natively: their names and fields in Transformers.

Metadata names come from ggml's docs/gguf.md and from llama.cpp's `convert_hf_to_gguf.py`, which writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from checkpoints.gguf.reader import GgufFile

FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
"""Fields that follow from others where a file lacks them."""
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True)
class Architecture:
    """Transformers' names for a GGUF architecture's model and fields."""

    model_type: str
    model_class: str
    fields: dict[str, str] = field(default_factory=dict)
    """Names of further fields that every file of the architecture has; empty for one that it may lack."""
    more: Callable[[GgufFile, dict[str, Any]], dict[str, Any]] = lambda file, config: {}
    """A function that returns the fields that must be computed."""


def need(file: GgufFile, name: str) -> Any:
    """Return a number of the architecture. Raises GgufError if it is missing or differs by layer."""
    value = file.get(name)
    if value is None:
        file.fail(f"{file.architecture}.{name}: is missing")
    check_number(file, name, value)
    return value


def check_number(file: GgufFile, name: str, value: object) -> None:
    """Raise GgufError if the value of a field is no number."""
    if isinstance(value, list):
        file.fail(f"{file.architecture}.{name}: differs by layer, which is not supported")
    if not isinstance(value, int | float):
        file.fail(f"{file.architecture}.{name}: is {value!r}, not a number")


def rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if "rope_freqs.weight" in file.tensors and file.architecture != "gemma4":
        return {"rope_scaling": _llama3_scaling(file, config)}
    kind = file.get("rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        return {}
    if kind not in ("linear", "yarn"):
        file.fail(f"{file.architecture}.rope.scaling.type: is {kind!r}, not none, linear, yarn or longrope")
    scaling = {"rope_type": kind, "factor": need(file, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = need(file, "rope.scaling.original_context_length")
        betas = {name: file.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: value for name, value in betas.items() if value is not None}
    return {"rope_scaling": scaling}


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling, of type default if there is none, for families that add fields to it."""
    scaling: dict[str, Any] = rope_scaling(file, config).get("rope_scaling", {"rope_type": "default"})
    return scaling


def _rotated_share(file: GgufFile, config: dict[str, Any]) -> float:
    """Return the share of a head's values that are rotated; without the field, all."""
    rotated: int = file.get("rope.dimension_count", config["head_dim"])
    return rotated / config["head_dim"]


def _without_mtp(file: GgufFile, config: dict[str, Any]) -> int:
    """Return the number of layers; the last blocks may be an MTP head's."""
    layers: int = config["num_hidden_layers"] - file.get("nextn_predict_layers", 0)
    return layers


def _llama3_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling, from each frequency's divisor; the slowest one's divisor is the factor."""
    found = _floats(file, "rope_freqs.weight")
    frequencies = config["rope_theta"] ** -(np.arange(len(found)) / len(found))
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(found[-1])),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(found, _llama3_factors(frequencies, scaling), rtol=1e-3):
        file.fail("tensor rope_freqs.weight: its factors are not those of Llama 3's rope scaling")
    return scaling


def _llama3_factors(frequencies: np.ndarray, scaling: dict[str, Any]) -> np.ndarray:
    """Return Llama 3.1's divisors of the frequencies: the factor for slow ones, 1 for fast ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)


def _floats(file: GgufFile, name: str) -> Sequence[float]:
    tensor = file.tensors.get(name)
    if tensor is None:
        file.fail(f"tensor {name}: is missing")
    if tensor.type is not GGMLQuantizationType.F32:
        file.fail(f"tensor {name}: has type {tensor.type.name}, not F32")
    values: list[float] = tensor.data.view(np.float32).reshape(-1).tolist()
    return values


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Gemma's own fields. The layer count tells the 27 B models, which scale queries differently."""
    largest = {"gemma2": 46, "gemma3": 62}[file.architecture]
    is_largest = config["num_hidden_layers"] == largest
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(file, config) | {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(file, config) | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_local_base_freq": file.get("rope.freq_base_swa", 10_000.0),
    }


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "partial_rotary_factor": _rotated_share(file, config),
        "sliding_window": file.get("attention.sliding_window") or None,
    }
    factors = [file.tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long")]
    if None not in factors:
        short, long = (_floats(file, each.name) for each in factors if each is not None)
        original = file.need("phi3.rope.scaling.original_context_length", int)
        found |= {
            "original_max_position_embeddings": original,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "factor": config["max_position_embeddings"] / original,
                "original_max_position_embeddings": original,
            },
        }
    return found


def _experts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    shared = file.get("expert_shared_feed_forward_length")
    normalizes = file.architecture == "qwen3moe"  # llama.cpp always does, whatever the file says
    return {"norm_topk_prob": normalizes} | (
        {"shared_expert_intermediate_size": shared} if shared is not None else {}
    )


def _gpt_oss(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling. The makers' yarn does not round the range of frequencies that it scales."""
    scaling = _rope(file, config)
    return {"rope_scaling": scaling | ({} if scaling["rope_type"] == "default" else {"truncate": False})}


def _gemma4(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return Gemma 4's own fields; full and sliding layers have heads of their own."""
    is_sliding = file.need("gemma4.attention.sliding_window_pattern", list)
    heads, widths = file.get("attention.head_count_kv"), file.get("feed_forward_length")
    widths = widths if isinstance(widths, list) else [need(file, "feed_forward_length")]
    full = is_sliding.index(False)
    freqs = _floats(file, "rope_freqs.weight")  # those that do not turn are divided by infinity
    rotated = sum(each == 1 for each in freqs) / len(freqs)
    found = {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in is_sliding],
        "head_dim": need(file, "attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"],
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) > min(widths),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.get("rope.freq_base_swa", 10_000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                "partial_rotary_factor": rotated,
            },
        },
    }
    if isinstance(heads, list):
        found |= {
            "num_key_value_heads": heads[is_sliding.index(True)],
            "num_global_key_value_heads": heads[full],
        }
    if file.get("expert_count"):
        names = _EXPERT_FIELDS | {"expert_used_count": "top_k_experts"}
        found |= {"enable_moe_block": True} | {ours: need(file, name) for name, ours in names.items()}
    return found


def _qwen35(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen3.5's recurrent layers."""
    heads = need(file, "ssm.time_step_rank")
    sections = [length for length in file.get("rope.dimension_sections", ()) if length]
    return {
        "num_hidden_layers": _without_mtp(file, config),
        "full_attention_interval": need(file, "full_attention_interval"),
        "linear_conv_kernel_dim": need(file, "ssm.conv_kernel"),
        "linear_key_head_dim": need(file, "ssm.state_size"),
        "linear_num_key_heads": need(file, "ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": need(file, "ssm.inner_size") // heads,
        "rope_scaling": _rope(file, config)
        | ({"mrope_section": sections, "mrope_interleaved": True} if sections else {})
        | {"partial_rotary_factor": need(file, "rope.dimension_count") / config["head_dim"]},
    }


def _mistral3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rope scaling, with Llama 4's of queries by their positions."""
    scaling = _rope(file, config)
    original = {"original_max_position_embeddings": config["max_position_embeddings"]}
    more = {"llama_4_scaling_beta": need(file, "attention.temperature_scale")}
    if scaling["rope_type"] == "yarn":
        more |= {"mscale": 1.0, "mscale_all_dim": file.get("rope.scaling.yarn_log_multiplier", 0.0)}
    return {"rope_scaling": original | scaling | more}


def _glm4_moe(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return GLM 4.5's own fields."""
    return {
        "num_hidden_layers": _without_mtp(file, config),
        "num_nextn_predict_layers": 0,
        "n_shared_experts": file.get("expert_shared_count", 0),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
        "norm_topk_prob": file.get("expert_weights_norm", False),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_scaling": _rope(file, config) | {"partial_rotary_factor": _rotated_share(file, config)},
    }


def _lfm2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return LFM2's own fields. Layers without key heads are convolutions."""
    heads = file.need("lfm2.attention.head_count_kv", list)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,  # the file's width is the adjusted one
        "conv_L_cache": need(file, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in file.tensors),
    }


_WINDOW = {"attention.sliding_window": "sliding_window"}
FAMILIES = {
    "llama": Architecture("llama", "LlamaForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _EXPERT_FIELDS, _experts),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERT_FIELDS, _experts),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _WINDOW, _gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _WINDOW, _gemma3),
    "gemma4": Architecture(
        "gemma4_text", "Gemma4ForCausalLM", _WINDOW | {"feed_forward_length": ""}, _gemma4
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", more=_phi3),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", more=_qwen35),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _EXPERT_FIELDS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size", "feed_forward_length": ""},
        _qwen35,
    ),
    "mistral3": Architecture("ministral3", "Ministral3ForCausalLM", more=_mistral3),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", _EXPERT_FIELDS | {"expert_count": "n_routed_experts"}, _glm4_moe
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", more=_lfm2),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _WINDOW | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        _gpt_oss,
    ),
}
"""Architectures whose tensors are read as stored, by the name in `general.architecture`."""
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
)


def family_of(file: GgufFile) -> Architecture | None:
    """Return the file's architecture if it is read natively.

    llama.cpp calls Mixtral a llama with experts, and Mistral Small 3 a Ministral without scaled queries.
    """
    if file.architecture == "llama" and file.get("expert_count"):
        return _MIXTRAL
    if file.architecture == "mistral3" and not file.get("attention.temperature_scale"):
        return FAMILIES["llama"]
    return FAMILIES.get(file.architecture)
