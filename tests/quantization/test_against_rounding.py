"""GPTQ and AWQ lose less than `--quantization int4` on inputs and weights like those of real models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight
from quantization import awq, gptq
from quantization.calibration import Moments

OUTPUTS, INPUTS, GROUP, TOKENS = 96, 256, 64, 1024


def case(num_huge: int) -> tuple[Tensor, Tensor]:
    """Return a weight with heavy tails and correlated inputs [tokens, in], `num_huge` of them huge."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, 48, generator=random) @ torch.randn(48, INPUTS, generator=random)
    inputs = inputs + 2 * torch.randn(TOKENS, INPUTS, generator=random)
    inputs[:, ::50] *= 5
    inputs[:num_huge] = 0.01 * torch.randn(num_huge, INPUTS, generator=random)
    inputs[:num_huge, 7] = 20_000
    weight = torch.randn(OUTPUTS, INPUTS, generator=random)
    return weight * (1 + 0.4 * torch.randn(OUTPUTS, INPUTS, generator=random).square()), inputs


@pytest.mark.parametrize("num_huge", [0, 2])
@pytest.mark.parametrize(
    ("method", "share"), [(gptq.quantize, 0.2), (awq.quantize, 0.7)], ids=["gptq", "awq"]
)
def test_outputs_of_ordinary_tokens_change_less(
    method: Callable[[Tensor, Tensor, int, int], QuantizedWeight], share: float, num_huge: int
) -> None:
    weight, inputs = case(num_huge)
    moments = Moments.of_width(INPUTS, inputs.device)
    moments.add(inputs)
    moments.complete()
    unseen = case(0)[1][TOKENS // 2 :]

    def error(rounded: Tensor) -> float:
        return float((unseen @ (rounded - weight).T).square().mean())

    rounded = round_to_nearest(weight, CodeFormat.INT4, GROUP).dequantized()
    calibrated = method(weight, moments.products, 4, GROUP).dequantized()
    assert error(calibrated) < share * error(rounded)
