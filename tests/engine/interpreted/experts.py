"""Experts by our kernels in Triton's interpreter, compared with Transformers' experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.devices.cuda import experts as by_tiles
from engine.devices.cuda.experts import RoutedTiles, TiledExperts, tile_experts
from engine.devices.cuda.products import Routes
from engine.linear.experts import split_experts
from engine.linear.quantized import QuantizedLinear, round_layers
from engine.load.quantized_checkpoint import load_quantized
from engine.quantization.weight import CodeFormat
from tests.engine.quantization import test_mxfp4

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


def both(name: str, format: CodeFormat | None, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return the experts computed by Transformers with rounded weights, and ours."""
    plain, model = experts_of(model_of(name, dtype)), model_of(name, dtype)
    if format is not None:
        split_experts(model, by_kernel=False)
        round_layers(experts_of(model), format)
        for tensor, linears in (
            ("gate_up_proj", experts_of(model).first),
            ("down_proj", experts_of(model).second),
        ):
            assert all(isinstance(each, QuantizedLinear) for each in linears)
            stacked = torch.stack([each.quantized.dequantized().to(dtype) for each in linears])
            getattr(plain, tensor).data = stacked.transpose(1, 2) if plain.is_transposed else stacked
    tile_experts(model, dtype)
    ours = experts_of(model)
    assert isinstance(ours, TiledExperts) and ours.first.format is format
    return plain, ours


def routing(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(rows)])
    weights = torch.rand(rows, 3, generator=generator).to(dtype)
    return torch.randn(rows, 64, generator=generator).to(dtype), chosen, weights


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_equal_transformers(name: str, format: CodeFormat | None) -> None:
    plain, ours = both(name, format, torch.float32)
    for rows in (1, 5, 70):
        given = routing(rows, torch.float32)
        torch.testing.assert_close(ours(*given), plain(*given), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("format", [None, CodeFormat.MXFP4])
def test_a_row_has_the_same_bits_in_every_batch(
    format: CodeFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small tiles and in large ones, and among experts of which some are another rank's."""
    _, ours = both("qwen3_moe", format, torch.bfloat16)
    hidden, chosen, weights = routing(80, torch.bfloat16)
    sizes = []
    monkeypatch.setattr(by_tiles, "Routes", lambda *parts: sizes.append(parts[2]) or Routes(*parts))
    together = ours(hidden, chosen, weights)
    for rows in (1, 7):
        assert torch.equal(ours(hidden[:rows], chosen[:rows], weights[:rows]), together[:rows])
    assert sizes == [64, 16, 16]
    part = ours.part(range(2, 5))
    lines, is_own = chosen.reshape(-1, 1) - 2, (chosen.reshape(-1, 1) >= 2) & (chosen.reshape(-1, 1) < 5)
    repeated, ones = hidden.repeat_interleave(3, 0), torch.ones(240, 1, dtype=torch.bfloat16)
    found = part(repeated, torch.where(is_own, lines, 3), ones)[is_own[:, 0]]
    expected = ours(repeated, chosen.reshape(-1, 1), ones)[is_own[:, 0]]
    assert torch.equal(found, expected)


def test_gpt_oss_experts_are_packed_as_they_are_loaded(tmp_path: Path) -> None:
    plain = test_mxfp4.write(tmp_path)
    packed = partial(RoutedTiles.of, dtype=torch.float32)
    config, device = AutoConfig.from_pretrained(tmp_path), torch.device("cpu")
    model = load_quantized(
        str(tmp_path), None, config, torch.float32, {}, device, keeps_experts=True, packed=packed
    )
    tile_experts(model, torch.float32)
    for number, layer in enumerate(model.model.layers):
        ours = layer.mlp.experts
        assert ours.first.format is ours.second.format is CodeFormat.MXFP4
        exact = GptOssExperts(config)
        path = f"model.layers.{number}.mlp.experts."
        exact.load_state_dict({name.removeprefix(path): plain[name] for name in plain if path in name})
        chosen, weights = torch.tensor([[0, 3], [2, 1]]), torch.rand(2, 2)
        hidden = torch.randn(2, config.hidden_size)
        with torch.no_grad():
            torch.testing.assert_close(
                ours(hidden, chosen, weights), exact(hidden, chosen, weights), atol=1e-4, rtol=1e-5
            )
