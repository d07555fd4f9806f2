"""AWQ and GPTQ change outputs less than rounding alone, with codes on the grid of a file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.quantization.weight import INT4_ZERO, CodeFormat, QuantizedWeight
from quantization import awq, gptq, grid
from quantization.awq import output_error

OUTPUTS, INPUTS, GROUP = 48, 128, 32


def case() -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, the moments of inputs with a few large channels, and their mean magnitude."""
    torch.manual_seed(0)
    inputs = torch.randn(500, INPUTS)
    inputs[:, ::20] *= 12
    return torch.randn(OUTPUTS, INPUTS), inputs.T @ inputs, inputs.abs().mean(0)


def rounded(weight: Tensor) -> Tensor:
    groups = grid.in_groups(weight, GROUP)
    return grid.spanning(groups, 4).rounded(groups).flatten(1)


def test_scales_change_outputs_less() -> None:
    weight, moments, inputs = case()
    scales = awq.search_scales([weight], moments, inputs, torch.arange(INPUTS), 4, GROUP)
    by_awq = awq.output_error(rounded(weight * scales) / scales - weight, moments)
    assert by_awq < 0.5 * awq.output_error(rounded(weight) - weight, moments)


def test_channels_that_share_a_scale_get_the_same() -> None:
    weight, moments, inputs = case()
    index = torch.arange(INPUTS) % 64
    scales = awq.search_scales([weight], moments, inputs[:64] + inputs[64:], index, 4, GROUP)
    assert scales.shape == (64,)
    assert scales.isfinite().all() and (scales > 0).all()


def test_equally_large_inputs_need_no_scales() -> None:
    weight, _, _ = case()
    index = torch.arange(INPUTS)
    scales = awq.search_scales([weight], torch.eye(INPUTS), torch.ones(INPUTS), index, 4, GROUP)
    assert torch.equal(scales, torch.ones(INPUTS))


def test_ranges_change_outputs_less() -> None:
    weight, moments, _ = case()
    weight[::3, ::GROUP] *= 2.5
    quantized = awq.quantize(weight, moments, 4, GROUP)
    clipped = awq.output_error(quantized.dequantized() - weight, moments)
    assert clipped < 0.95 * awq.output_error(rounded(weight) - weight, moments)
    assert quantized.zeros is not None and quantized.group_size == GROUP


def test_a_range_includes_zero_and_clips_beyond() -> None:
    weight = torch.tensor([[3.0, 4.0, 5.0, 6.0]])
    positive = grid.spanning(weight, 4)
    assert positive.rounded(torch.zeros(1, 4)).abs().max() == 0
    assert torch.allclose(positive.rounded(weight), weight, atol=0.21)
    for sign in (1, -1):
        assert grid.spanning(sign * weight, 4, clip=0.5).rounded(sign * weight).abs().max() <= 3.001


def test_scales_are_representable_in_the_file() -> None:
    weight, _, _ = case()
    groups = grid.in_groups(weight * torch.logspace(-8, 2, OUTPUTS).unsqueeze(1), GROUP)
    for made in (grid.symmetric(groups, 4), grid.spanning(groups, 4)):
        assert torch.equal(made.scales, made.scales.half().float())
        assert (made.scales != 0).all() and made.scales.isfinite().all()
    zero = torch.zeros(2, 1, GROUP)
    assert grid.spanning(zero, 4).rounded(zero).eq(0).all()


def correlated() -> tuple[Tensor, Tensor]:
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
    weight, hessian = correlated()
    quantized = gptq.quantize(weight, hessian, bits, GROUP, desc_act)
    assert quantized.format is (CodeFormat.INT4 if bits == 4 else CodeFormat.INT8)
    assert quantized.group_size == GROUP and quantized.zeros is None
    by_gptq = output_error(quantized.dequantized() - weight, hessian)
    assert by_gptq < 0.35 * output_error(nearest(weight, bits) - weight, hessian)


def test_desc_act_takes_the_largest_inputs_first() -> None:
    weight, hessian = correlated()
    permutation = gptq.quantize(weight, hessian, 4, GROUP, desc_act=True).permutation
    assert permutation is not None
    ordered = hessian.diagonal()[permutation]
    assert (ordered[:-1] >= ordered[1:]).all()
    assert gptq.quantize(weight, hessian, 4, GROUP).permutation is None


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight, _ = correlated()
    quantized = gptq.quantize(weight, torch.diag(torch.linspace(1, 2, INPUTS)), 4, GROUP)
    assert torch.equal(quantized.codes, nearest_codes(weight, quantized))


def test_inputs_that_never_occurred_are_rounded_to_nearest() -> None:
    weight, hessian = correlated()
    silent = torch.arange(0, INPUTS, 5)
    hessian[silent] = 0
    hessian[:, silent] = 0
    quantized = gptq.quantize(weight, hessian, 4, GROUP)
    assert torch.equal(quantized.codes[:, silent], nearest_codes(weight, quantized)[:, silent])
    louder = gptq.quantize(weight, 4096 * hessian, 4, GROUP)
    assert torch.equal(louder.codes, quantized.codes), "the damping follows the inputs' scale"
    nothing = gptq.quantize(weight, torch.zeros_like(hessian), 4, GROUP)
    assert torch.equal(nothing.codes, nearest_codes(weight, nothing))
