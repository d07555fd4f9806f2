"""Linear layers with quantized weights in every format, and layers restricted to some outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engine.linear.packed import PackedLinear, linear_of
from engine.linear.packed_quantized import PackedQuantizedLinear, PackedWeight, with_outputs
from engine.linear.quantized import QuantizedLinear
from engine.quantization.weight import CodeFormat, QuantizedWeight
from tests.engine.kernels import needs_kernel
from tests.engine.quantized_weights import make_weight


def dequantized_by_hand(weight: QuantizedWeight) -> Tensor:
    """Dequantize element by element by the format's definition; float64 [out_features, in_features]."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    outputs, inputs = weight.codes.shape
    result = torch.zeros(outputs, inputs, dtype=torch.float64)
    for n in range(outputs):
        for k in range(inputs):
            group = k // weight.group_size
            value = float(weight.codes[n, k])
            if weight.format is CodeFormat.MXFP4:
                value = magnitudes[int(value) % 8] * (-1 if value >= 8 else 1)
            elif weight.format is CodeFormat.INT4:
                value -= 8 if weight.zeros is None else float(weight.zeros[n, group])
            place = k if weight.permutation is None else int(weight.permutation[k])
            result[n, place] = value * float(weight.scales[n, group])
    return result


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(
    ("format", "group", "zeros"),
    [
        (CodeFormat.INT8, None, False),
        (CodeFormat.INT4, 32, False),
        (CodeFormat.INT4, 32, True),
        (CodeFormat.FP8, None, False),
        (CodeFormat.MXFP4, 32, False),
    ],
)
def test_a_layer_computes_with_the_dequantized_weight(
    format: CodeFormat, group: int | None, zeros: bool, permuted: bool
) -> None:
    weight = make_weight(format, 64, 9, group, zeros, permuted)
    bias = torch.randn(9)
    x = torch.randn(3, 64)
    expected = x.double() @ dequantized_by_hand(weight).T + bias
    torch.testing.assert_close(QuantizedLinear(weight, bias)(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scales": torch.ones(9, 3)}, r"scales \[9, 3\] do not fit codes \[9, 64\]"),
        ({"scales": torch.ones(8, 2)}, r"scales \[8, 2\] do not fit codes \[9, 64\]"),
        ({"zeros": torch.ones(9, 1)}, r"zeros \[9, 1\] do not fit scales \[9, 2\]"),
        ({"permutation": torch.arange(63)}, r"permutation \[63\] does not fit 64 inputs"),
        ({"bias": torch.ones(8)}, r"bias \[8\] does not fit 9 outputs"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Tensor], reason: str) -> None:
    weight = make_weight(CodeFormat.INT4, 64, 9, 32)
    parts = vars(weight) | {name: value for name, value in changes.items() if name != "bias"}
    with pytest.raises(ValueError, match=reason):
        QuantizedLinear(QuantizedWeight(**parts), changes.get("bias"))


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


@needs_kernel
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind.startswith("packed")])
def test_packed_layers_take_inputs_of_any_layout_and_batch_shape(kind: str) -> None:
    ours = LAYERS[kind](None)
    turned = torch.randn(INPUTS, 3, 5).bfloat16().permute(1, 2, 0)
    assert torch.equal(ours(turned), ours(turned.contiguous().view(15, INPUTS)).view(3, 5, OUTPUTS))
    assert ours(turned.new_empty(1, 0, INPUTS)).shape == (1, 0, OUTPUTS)
    for wrong in (torch.randn(2, INPUTS), torch.randn(2, INPUTS + 2).bfloat16()):
        with pytest.raises(ValueError, match="64 features"):
            ours(wrong)


def test_other_layers_cannot_be_restricted() -> None:
    with pytest.raises(TypeError, match="Embedding is no linear layer"):
        with_outputs(nn.Embedding(3, 4), torch.tensor([0]))
