"""A linear layer restricted to some outputs gives the whole layer's, in the requested order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from engine.linear.packed import PackedLinear, linear_of
from engine.linear.packed_quantized import PackedQuantizedLinear, PackedWeight, with_outputs
from engine.linear.quantized import QuantizedLinear
from engine.quantization.weight import CodeFormat
from tests.engine.kernels import needs_kernel
from tests.engine.quantized_weights import make_weight

OUTPUTS, INPUTS = 150, 64


def plain(bias: torch.Tensor | None) -> nn.Linear:
    return linear_of(
        torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16(), bias
    )


def quantized(bias: torch.Tensor | None) -> QuantizedLinear:
    return QuantizedLinear(make_weight(CodeFormat.INT4, INPUTS, OUTPUTS, 32, zeros=True, permuted=True), bias)


LAYERS: dict[str, Callable[[torch.Tensor | None], nn.Module]] = {
    "plain": plain,
    "packed": lambda bias: PackedLinear(plain(bias)),
    "quantized": quantized,
    "packed-quantized": lambda bias: PackedQuantizedLinear(PackedWeight.of(quantized(bias).quantized), bias),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs_kernel] if kind.startswith("packed") else []) for kind in LAYERS]
)
def test_chosen_outputs(kind: str, bias: bool) -> None:
    whole = LAYERS[kind](torch.randn(OUTPUTS).bfloat16() if bias else None)
    outputs = torch.tensor([149, 3, 77, 64, 63, 0, 3])
    x = torch.randn(5, INPUTS).bfloat16()
    part = with_outputs(whole, outputs)
    torch.testing.assert_close(part(x), whole(x)[:, outputs], rtol=1e-2, atol=1e-2)
    if kind == "packed-quantized":
        assert torch.equal(part(x), whole(x)[:, outputs]), "the same kernel, the same bits"


def test_other_layers_cannot_be_restricted() -> None:
    with pytest.raises(TypeError, match="Embedding is no linear layer"):
        with_outputs(nn.Embedding(3, 4), torch.tensor([0]))
