"""Small models with experts, as Transformers makes them and with quantized layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3MoeConfig

from engine.linear.experts import split_experts
from engine.linear.quantized import QuantizedLinear
from engine.load.rounding import round_layers
from engine.quantization.weight import CodeFormat

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, vocab_size=64, moe_intermediate_size=96, num_experts=6, num_experts_per_tok=3
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, vocab_size=64, intermediate_size=96, num_local_experts=6, num_experts_per_tok=3, head_dim=32
    ),
}
FORMATS = (None, *CodeFormat)


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def experts_of(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0].mlp.experts


def both(
    name: str, format: CodeFormat | None, dtype: torch.dtype, *, by_kernel: bool
) -> tuple[nn.Module, PreTrainedModel]:
    """Return Transformers' experts with rounded weights, in float32, and a model whose experts are split into
    quantized layers, if there is a format.
    """
    plain, model = experts_of(model_of(name, dtype)).float(), model_of(name, dtype)
    if format is not None:
        split_experts(model, by_kernel=by_kernel)
        split = experts_of(model)
        round_layers(split, format)
        for tensor, linears in (("gate_up_proj", split.first), ("down_proj", split.second)):
            assert all(isinstance(each, QuantizedLinear) for each in linears)
            stacked = torch.stack([each.quantized.dequantized() for each in linears])
            getattr(plain, tensor).data = stacked.transpose(1, 2) if plain.is_transposed else stacked
    return plain, model


def routing(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the rows' experts and their weights."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(rows)])
    weights = torch.rand(rows, 3, generator=generator).to(dtype)
    return torch.randn(rows, 64, generator=generator).to(dtype), chosen, weights
