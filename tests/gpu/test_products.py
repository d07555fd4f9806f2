"""Kernels of products and experts on the GPU, compared with torch's products in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda import experts as cuda_experts
from engine.devices.cuda.experts import RoutedTiles, Router, routes_of
from engine.devices.cuda.products import TiledLinear
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.quantization.weight import CodeFormat
from tests.engine.interpreted.routing import CASES, INPUTS, experts_of

CUDA = torch.device("cuda")


@pytest.mark.parametrize("format", [None, *CodeFormat], ids=str)
def test_products_in_tiles(format: CodeFormat | None) -> None:
    """A row gives the same bits alone, with few others and with many, for which programs share no sums."""
    torch.manual_seed(0)
    plain = torch.randn(300, 2560, dtype=torch.bfloat16)
    rows = torch.randn(200, 2560, dtype=torch.bfloat16, device=CUDA)
    if format is None:
        tiled, weight = TiledLinear.plain(plain.to(CUDA), None), plain.float()
    else:
        quantized = round_to_nearest(plain.to(CUDA), format, 32)
        tiled, weight = TiledLinear.quantized(quantized, None), quantized.dequantized()
    together = tiled(rows)
    expected = rows.double() @ weight.to(CUDA).double().T
    torch.testing.assert_close(together.double(), expected, atol=0.2, rtol=1.6e-2)
    assert torch.equal(tiled(rows[:9]), together[:9])
    assert all(torch.equal(tiled(rows[row : row + 1])[0], together[row]) for row in (0, 70, 199))


@pytest.mark.parametrize("format", [None, *CodeFormat], ids=str)
def test_experts(format: CodeFormat | None) -> None:
    """A row gives the same bits in tiles of 16 rows and of 64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        plain = nn.Linear(512, 192, dtype=torch.bfloat16, device=CUDA)
        if format is None:
            layers.append(plain)
        else:
            layers.append(QuantizedLinear(round_to_nearest(plain.weight.detach(), format, 32), plain.bias))
    experts = RoutedTiles.of(layers, torch.bfloat16)
    rows = torch.randn(600, 512, dtype=torch.bfloat16, device=CUDA)
    chosen = torch.rand(600, 8, device=CUDA).topk(2, dim=1).indices
    together = experts(rows, routes_of(chosen, 8))
    for place, number in enumerate(chosen[:20].flatten().tolist()):
        layer, row = layers[number], rows[place // 2].double()
        weight = layer.weight if format is None else layer.quantized.dequantized()
        expected = row @ weight.double().T + layer.bias.double()
        torch.testing.assert_close(together[place].double(), expected, atol=0.02, rtol=1.6e-2)
    for count in (1, 40):
        assert torch.equal(experts(rows[:count], routes_of(chosen[:count], 8)), together[: 2 * count])


@pytest.mark.parametrize("case", CASES)
def test_routers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row has the same experts, and bits of their weights, in tiles of 16 rows and of 64."""
    experts = experts_of(case)
    fields = {name: getattr(experts, name) for name in ("router_bias", "preferences", "factors")}
    moved = {name: each.to(CUDA) for name, each in fields.items() if each is not None}
    moved["router"] = experts.router.to(CUDA, torch.bfloat16)
    assert experts.shared_gate is not None
    experts.shared_gate.linears[0].to(CUDA)
    router = Router.of(replace(experts, **moved), shared=True)
    x = torch.randn(300, INPUTS, dtype=torch.bfloat16, device=CUDA)
    monkeypatch.setattr(cuda_experts, "_FEW_EACH", 0)
    _, together = router.routes(x)
    chosen, _ = router.choose(x)
    monkeypatch.setattr(cuda_experts, "_FEW_EACH", 1 << 20)
    for count in (1, 40, 300):
        assert torch.equal(router.routes(x[:count])[1], together[:count])
        assert torch.equal(router.choose(x[:count])[0], chosen[:count])
