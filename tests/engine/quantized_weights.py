"""Random quantized weights of each format."""

from __future__ import annotations

import torch

from engine.quantization.weight import CodeFormat, QuantizedWeight


def make_weight(
    format: CodeFormat,
    inputs: int,
    outputs: int,
    group: int | None = None,
    zeros: bool = False,
    permuted: bool = False,
) -> QuantizedWeight:
    """Return random codes, and scales like a trained layer's. A `group` of None means one scale for each
    output.
    """
    torch.manual_seed(inputs + outputs)
    groups = 1 if group is None else inputs // group
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if format is CodeFormat.INT8:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    elif format is CodeFormat.FP8:
        codes = torch.randn(outputs, inputs).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedWeight(
        format,
        codes,
        torch.rand(outputs, groups) * 0.02 + 0.001,
        torch.randint(0, 17, (outputs, groups)).float() if zeros else None,
        torch.randperm(inputs) if permuted else None,
    )
