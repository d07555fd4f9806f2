"""Experts by our kernels in Triton's interpreter, compared with Transformers' experts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from engine.devices.cuda import experts as cuda_experts
from engine.devices.cuda.experts import RoutedTiles, TiledExperts, routes_of, tile_experts
from engine.devices.cuda.products import Routes, tile_linears
from engine.load.quantized_checkpoint import load_quantized
from engine.load.rounding import round_layers
from engine.model.program import Activation, Mlp, Product
from engine.quantization.weight import CodeFormat
from tests.engine.expert_models import CONFIGS, FORMATS, both, experts_of, routing
from tests.engine.quantization import test_mxfp4


def packed(name: str, format: CodeFormat | None, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return the experts computed by Transformers with rounded weights, and ours."""
    plain, model = both(name, format, dtype, by_kernel=False)
    tile_experts(model, dtype)
    ours = experts_of(model)
    assert isinstance(ours, TiledExperts) and ours.first.format is format
    return plain, ours


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_equal_transformers(name: str, format: CodeFormat | None) -> None:
    plain, ours = packed(name, format, torch.float32)
    for rows in (1, 5, 70):
        given = routing(rows, torch.float32)
        torch.testing.assert_close(ours(*given), plain(*given), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("format", [None, CodeFormat.MXFP4])
def test_a_row_has_the_same_bits_in_every_batch(
    format: CodeFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small tiles and in large ones, and among experts of which some are another rank's."""
    _, ours = packed("qwen3_moe", format, torch.bfloat16)
    hidden, chosen, weights = routing(80, torch.bfloat16)
    sizes = []
    monkeypatch.setattr(cuda_experts, "Routes", lambda *parts: sizes.append(parts[2]) or Routes(*parts))
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


@pytest.mark.parametrize("format", [None, CodeFormat.INT8, CodeFormat.MXFP4])
def test_an_mlp_like_the_experts_is_one_more_of_them(format: CodeFormat | None) -> None:
    """Its layers stay what they were, as views."""
    _, ours = packed("qwen3_moe", format, torch.float32)
    mlp = nn.ModuleDict({name: nn.Linear(64, 96, bias=False) for name in ("gate_proj", "up_proj")})
    mlp["down_proj"] = nn.Linear(96, 64, bias=False)
    mlp.requires_grad_(False)
    if format is not None:
        round_layers(mlp, format)
        tile_linears(mlp, torch.float32, plain=False)
    hidden, chosen, _ = routing(20, torch.float32)
    expected = mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](hidden)) * mlp["up_proj"](hidden))
    products = Product((mlp["gate_proj"], mlp["up_proj"])), Product((mlp["down_proj"],))
    whole = ours.and_shared(Mlp(*products, Activation.SILU, is_gated=True))
    assert whole is not None and whole.num_experts == 7
    chosen = torch.cat([chosen, torch.full((20, 1), 6)], dim=1)
    results = whole.results(hidden, routes_of(chosen, 7)).view(20, 4, 64)
    torch.testing.assert_close(results[:, 3], expected, atol=1e-5, rtol=1e-5)
    alone = ours.results(hidden, routes_of(chosen[:, :3], 6)).view(20, 3, 64)
    torch.testing.assert_close(results[:, :3], alone, atol=0, rtol=0)
    again = mlp["down_proj"](nn.functional.silu(mlp["gate_proj"](hidden)) * mlp["up_proj"](hidden))
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    assert ours.and_shared(Mlp(*products, Activation.GELU_TANH, is_gated=True)) is None
