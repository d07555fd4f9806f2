"""Fused experts in packed form: right to bfloat16's last bits, and the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3MoeConfig

from engine.linear.experts import (
    ExpertsModule,
    RoutedLinear,
    RoutedQuantizedLinear,
    join_experts,
    pack_experts,
    split_experts,
)
from engine.linear.packed_quantized import pack_quantized_linears
from engine.linear.quantized import QuantizedLinear, round_layers
from engine.quantization.weight import CodeFormat
from tests.engine.kernels import needs_kernel

pytestmark = needs_kernel

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
QWEN = Qwen3MoeConfig(
    **SIZES,
    vocab_size=64,
    intermediate_size=64,
    moe_intermediate_size=96,
    num_experts=6,
    num_experts_per_tok=3,
)
GPT_OSS = GptOssConfig(
    **SIZES, vocab_size=64, intermediate_size=96, num_local_experts=6, num_experts_per_tok=3, head_dim=32
)
CONFIGS = {"qwen3_moe": QWEN, "gpt_oss": GPT_OSS}
FORMATS = (None, *CodeFormat)


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def experts_of(model: PreTrainedModel) -> nn.Module:
    return model.model.layers[0].mlp.experts


def packed(name: str, format: CodeFormat | None) -> tuple[nn.Module, ExpertsModule]:
    """Return the experts computed by Transformers in float32 with rounded weights, and ours."""
    plain, model = make_model(name), make_model(name)
    if format is None:
        pack_experts(model)
    else:
        for each in (plain, model):
            split_experts(each)
            round_layers(experts_of(each), format)
        exact = make_model(name)
        _take_dequantized(experts_of(exact), experts_of(plain))
        plain = exact
        pack_quantized_linears(model)
        join_experts(model)
    ours = experts_of(model)
    assert isinstance(ours, ExpertsModule)
    return experts_of(plain).float(), ours


def _take_dequantized(experts: nn.Module, split: nn.Module) -> None:
    experts.float()
    for name, linears in (("gate_up_proj", split.first), ("down_proj", split.second)):
        weights = []
        for linear in linears:
            assert isinstance(linear, QuantizedLinear)
            weights.append(linear.quantized.dequantized())
        stacked = torch.stack(weights)
        getattr(experts, name).data = stacked.transpose(1, 2) if experts.is_transposed else stacked


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(rows)])
    weights = torch.rand(rows, 3, generator=generator).bfloat16()
    return torch.randn(rows, 64, generator=generator).bfloat16(), chosen, weights


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_equal_transformers(name: str, format: CodeFormat | None) -> None:
    plain, ours = packed(name, format)
    expected = RoutedLinear if format is None else RoutedQuantizedLinear
    assert isinstance(ours.first, expected) and isinstance(ours.second, expected)
    for rows in (1, 5, 70):
        hidden, chosen, weights = routing(rows)
        exact = plain(hidden.float(), chosen, weights.float())
        assert (ours(hidden, chosen, weights) - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_has_the_same_bits_in_every_batch(name: str, format: CodeFormat | None) -> None:
    _, ours = packed(name, format)
    hidden, chosen, weights = routing(200)
    alone = torch.cat([ours(hidden[r : r + 1], chosen[r : r + 1], weights[r : r + 1]) for r in range(8)])
    for rows in (8, 50, 200):
        assert torch.equal(ours(hidden[:rows], chosen[:rows], weights[:rows])[:8], alone)


def test_a_missing_expert_gives_zeros() -> None:
    layer = RoutedLinear(torch.ones(2, 3, 4).bfloat16(), None)
    out = layer(torch.ones(2, 4).bfloat16(), torch.tensor([1, 2, -1, 0]))
    assert out.tolist() == [[4, 4, 4], [0, 0, 0], [0, 0, 0], [4, 4, 4]]


def test_unsupported_inputs_are_refused() -> None:
    layer = RoutedLinear(torch.ones(2, 3, 4).bfloat16(), None)
    with pytest.raises(ValueError, match="4 features for 3 experts"):
        layer(torch.ones(2, 4).bfloat16(), torch.tensor([1, 0, 1]))
