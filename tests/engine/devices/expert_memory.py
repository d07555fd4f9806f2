"""The weight memory of published models with experts, on tensors without memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig

from engine.devices.cuda.experts import RoutedTiles, tile_experts
from engine.linear.experts import fused_experts, split_experts
from engine.load.quantized_checkpoint import set_experts
from engine.load.rounding import round_layers
from engine.quantization.formats import StackedWeights
from engine.quantization.weight import CodeFormat

GPT_OSS: dict[str, Any] = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "vocab_size": 201088,
}
QWEN: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
EXPERT_MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], int]] = {
    "gpt-oss-120b in MXFP4": (GptOssConfig, GPT_OSS, 36),
    "Qwen3-30B-A3B in bf16": (Qwen3MoeConfig, QWEN, 48),
    "Qwen3-30B-A3B in int4": (Qwen3MoeConfig, QWEN, 48),
}
"""The configuration, its sizes and the number of layers."""


def empty_model(name: str, layers: int) -> PreTrainedModel:
    config, sizes, _ = EXPERT_MODELS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config(**sizes, num_hidden_layers=layers), dtype=torch.bfloat16
        )


def packed_model(name: str, layers: int) -> PreTrainedModel:
    """Return the model as a GPU holds it, except that its other linear layers are not packed."""
    model = empty_model(name, layers)
    if "MXFP4" in name:
        stacks: dict[str, Any] = {}
        for path in fused_experts(model, by_kernel=False):
            for tensor in ("gate_up_proj", "down_proj"):
                experts, inputs, outputs = model.get_parameter(f"{path}.{tensor}").shape
                sizes = experts, outputs, inputs // 32
                blocks = torch.empty(*sizes, 16, dtype=torch.uint8, device="meta")
                stacks[f"{path}.{tensor}"] = StackedWeights(
                    blocks, torch.empty(sizes, dtype=torch.uint8, device="meta")
                )
        set_experts(model, stacks, partial(RoutedTiles.of, dtype=torch.bfloat16))
    if "int4" in name:
        split_experts(model, by_kernel=False)
        round_layers(model, CodeFormat.INT4, model.get_output_embeddings())
    tile_experts(model, torch.bfloat16)
    return model


def weight_bytes(name: str) -> dict[str, int]:
    """Return the bytes of the experts' weights and of all others."""
    layers = EXPERT_MODELS[name][2]
    one, two = (packed_model(name, count) for count in (1, 2))
    is_routed = [
        sum(_bytes(each) for each in model.modules() if isinstance(each, RoutedTiles)) for model in (one, two)
    ]
    every = [_bytes(model) for model in (one, two)]
    experts, rest = is_routed[0] * layers, every[0] - is_routed[0]
    each_rest = every[1] - every[0] - is_routed[0]
    return {"experts": experts, "other": rest + (layers - 1) * each_rest}


def dense_bytes(name: str) -> int:
    """Return the bytes of all weights in bfloat16."""
    one, two = (_bytes(empty_model(name, count)) for count in (1, 2))
    return one + (EXPERT_MODELS[name][2] - 1) * (two - one)


def _bytes(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
