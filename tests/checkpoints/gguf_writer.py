"""Writes small models as GGUF files, as llama.cpp's `convert_hf_to_gguf.py` does."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import quantize
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL, USER_DEFINED = 3, 4
F32 = GGMLQuantizationType.F32


def byte_level(vocab_size: int, pre: str = "default") -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer with three control tokens and a few merges."""
    merges = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"]
    tokens = ["<s>", "</s>", "<pad>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"<unused{number}>" for number in range(vocab_size - len(tokens))]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [1] * (vocab_size - 3),
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
    }


def write_gguf(
    path: Path,
    architecture: str,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = F32,
    *,
    more: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] = MappingProxyType({}),
    without: str = "",
    **fields: Any,
) -> None:
    """Write a model with its matrices in a GGUF type, adding the tensors of `more` and leaving out `without`.

    `fields` are further metadata, by their names without the architecture.
    """
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True
    told = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or 16,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "rope.freq_base": 10_000.0,
        **fields,
    }
    metadata = {f"{architecture}.{name}": value for name, value in told.items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in byte_level(config.vocab_size).items()}
    tensors = {**dict(_tensors(architecture, model, kind)), **more}
    tensors.pop(without, None)
    write_raw(path, architecture, metadata, tensors)


def write_raw(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
) -> None:
    writer = GGUFWriter(path, architecture)
    for name, value in metadata.items():
        _add(writer, name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(name, value)


def _tensors(
    architecture: str, model: PreTrainedModel, kind: GGMLQuantizationType
) -> Iterator[tuple[str, tuple[np.ndarray, GGMLQuantizationType]]]:
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(architectures[architecture], model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for parameter, weight in model.state_dict().items():
        values = weight.float().numpy()
        layer, _, suffix = parameter.rpartition(".")
        if layer == "lm_head" and tied:
            continue
        if ".experts." in parameter:
            is_bias = suffix.endswith("_bias")
            name = "bias" if is_bias else "weight"
            for part, stacked in _expert_parts(architecture, suffix, values).items():
                yield f"blk.{layer.split('.')[2]}.{part}.{name}", _encoded(stacked, F32 if is_bias else kind)
            continue
        if architecture.startswith("qwen35"):
            values = _qwen35_values(model.config, layer.rpartition(".")[2], suffix, values)
        if suffix in ("sinks", "A_log", "layer_scalar"):
            name = f"{names.get_name(parameter)}{'' if suffix == 'A_log' else '.weight'}"
            yield name, _encoded(values, kind)
            continue
        if suffix in ("scale", "per_expert_scale"):
            name = "ffn_gate_inp" if suffix == "scale" else "ffn_down_exps"
            yield f"blk.{layer.split('.')[2]}.{name}.scale", _encoded(values, kind)
            continue
        if suffix == "dt_bias":
            layer, suffix = f"{layer}.dt_proj", "bias"
        if suffix == "e_score_correction_bias":
            layer, suffix = f"{layer}.e_score_correction", "bias"
        if (
            architecture in ("gemma2", "gemma3", "qwen35", "qwen35moe")
            and layer.endswith("norm")
            and ".linear_attn." not in layer
        ):
            values = values + 1
        if layer.endswith((".conv1d", ".conv.conv")):
            yield f"{names.get_name(layer)}.{suffix}", _encoded(values.squeeze(1), F32)
            continue
        if architecture in ("llama", "mistral3") and layer.endswith(("q_proj", "k_proj")):
            heads = len(values) // model.config.head_dim
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        yield f"{names.get_name(layer)}.{suffix}", _encoded(values, kind)


def _qwen35_values(config: Any, layer: str, suffix: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor's values with the value heads of all keys in turns, and decays as they are applied."""
    if layer == "out_proj":
        return _tiled(config, values.T, values.shape[1]).T
    if layer in ("in_proj_qkv", "conv1d", "in_proj_z"):
        return _tiled(config, values, config.linear_num_value_heads * config.linear_value_head_dim)
    if layer in ("in_proj_a", "in_proj_b") or suffix in ("A_log", "dt_bias"):
        values = _tiled(config, values, len(values))
    return -np.exp(values) if suffix == "A_log" else values


def _tiled(config: Any, values: np.ndarray, own: int) -> np.ndarray:
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    first, last = values[: len(values) - own], values[len(values) - own :]
    grouped = last.reshape(keys, heads // keys, -1)
    return np.concatenate([first, grouped.swapaxes(0, 1).reshape(last.shape)])


def _expert_parts(architecture: str, suffix: str, values: np.ndarray) -> dict[str, np.ndarray]:
    is_gpt_oss = architecture == "gpt-oss"
    if is_gpt_oss and values.ndim == 3:
        values = values.swapaxes(1, 2)
    if suffix.startswith("down_proj"):
        return {"ffn_down_exps": values}
    if architecture == "gemma4":
        return {"ffn_gate_up_exps": values}
    gate, up = (values[:, 0::2], values[:, 1::2]) if is_gpt_oss else np.split(values, 2, axis=1)
    return {"ffn_gate_exps": gate, "ffn_up_exps": up}


def _encoded(values: np.ndarray, kind: GGMLQuantizationType) -> tuple[np.ndarray, GGMLQuantizationType]:
    if values.ndim == 1:
        return np.ascontiguousarray(values), F32
    return quantize(np.ascontiguousarray(values), kind), kind
