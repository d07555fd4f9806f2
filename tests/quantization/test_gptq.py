"""GPTQ compared with rounding to nearest by the error that it minimizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.quantization.weight import INT4_ZERO, CodeFormat, QuantizedWeight
from quantization import gptq, grid
from quantization.awq import output_error

OUTPUTS, INPUTS, GROUP = 48, 128, 32


def case() -> tuple[Tensor, Tensor]:
    """Return a weight, and the Hessian of correlated inputs of different sizes."""
    torch.manual_seed(0)
    inputs = torch.randn(600, 24) @ torch.randn(24, INPUTS) + 0.3 * torch.randn(600, INPUTS)
    inputs *= torch.linspace(0.2, 3, INPUTS)[torch.randperm(INPUTS)]
    return torch.randn(OUTPUTS, INPUTS), inputs.T @ inputs


def nearest(weight: Tensor, bits: int) -> Tensor:
    groups = grid.in_groups(weight, GROUP)
    return grid.symmetric(groups, bits).rounded(groups).flatten(1)


def nearest_codes(weight: Tensor, quantized: QuantizedWeight) -> Tensor:
    """Return the nearest codes on the grids of a quantized weight."""
    scales = quantized.scales.repeat_interleave(GROUP, 1)
    return (weight / scales + INT4_ZERO).round().clamp(0, 15).to(torch.uint8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("desc_act", [False, True])
def test_outputs_change_less_than_by_rounding_to_nearest(bits: int, desc_act: bool) -> None:
    weight, hessian = case()
    quantized = gptq.quantize(weight, hessian, bits, GROUP, desc_act)
    assert quantized.format is (CodeFormat.INT4 if bits == 4 else CodeFormat.INT8)
    assert quantized.group_size == GROUP and quantized.zeros is None
    by_gptq = output_error(quantized.dequantized() - weight, hessian)
    assert by_gptq < 0.35 * output_error(nearest(weight, bits) - weight, hessian)


def test_desc_act_takes_the_largest_inputs_first() -> None:
    weight, hessian = case()
    permutation = gptq.quantize(weight, hessian, 4, GROUP, desc_act=True).permutation
    assert permutation is not None
    ordered = hessian.diagonal()[permutation]
    assert (ordered[:-1] >= ordered[1:]).all()
    assert gptq.quantize(weight, hessian, 4, GROUP).permutation is None


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight, _ = case()
    quantized = gptq.quantize(weight, torch.diag(torch.linspace(1, 2, INPUTS)), 4, GROUP)
    assert torch.equal(quantized.codes, nearest_codes(weight, quantized))


def test_inputs_that_never_occurred_are_rounded_to_nearest() -> None:
    weight, hessian = case()
    silent = torch.arange(0, INPUTS, 5)
    hessian[silent] = 0
    hessian[:, silent] = 0
    quantized = gptq.quantize(weight, hessian, 4, GROUP)
    assert torch.equal(quantized.codes[:, silent], nearest_codes(weight, quantized)[:, silent])
    louder = gptq.quantize(weight, 4096 * hessian, 4, GROUP)
    assert torch.equal(louder.codes, quantized.codes), "the damping follows the inputs' scale"
    nothing = gptq.quantize(weight, torch.zeros_like(hessian), 4, GROUP)
    assert torch.equal(nothing.codes, nearest_codes(weight, nothing))
