"""Linear layers with quantized weights (`engine.quantization.weight`) and unrounded inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.linear.packed import linear_of
from engine.quantization.weight import CodeFormat, QuantizedWeight


class QuantizedLinear(nn.Module):
    """An `nn.Linear` with a quantized weight, which is dequantized to the input's dtype to compute."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    permutation: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        """Take `bias` [out_features], in the model's dtype. Raises ValueError if shapes don't fit."""
        super().__init__()
        fault = _fault(weight, bias)
        if fault is not None:
            raise ValueError(fault)
        self.format: CodeFormat = weight.format
        self.input_group = weight.input_group
        self.out_features, self.in_features = weight.codes.shape
        for name in ("codes", "scales", "zeros", "permutation"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> QuantizedWeight:
        parts = self.codes, self.scales, self.zeros, self.permutation
        return QuantizedWeight(self.format, *parts, input_group=self.input_group)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.quantized.dequantized().to(x.dtype), self.bias)

    def plain(self, dtype: torch.dtype) -> nn.Linear:
        """Return a plain layer with the dequantized weight."""
        return linear_of(self.quantized.dequantized().to(dtype), self.bias)

    def extra_repr(self) -> str:
        shape = f"{self.in_features}, {self.out_features}"
        return f"{shape}, {self.format.value}, groups of {self.quantized.group_size}"


def _fault(weight: QuantizedWeight, bias: Tensor | None) -> str | None:
    outputs, inputs = weight.codes.shape
    rows, groups = weight.scales.shape
    if rows != outputs or not groups or inputs % groups:
        return f"scales {[rows, groups]} do not fit codes {[outputs, inputs]}"
    if weight.zeros is not None and weight.zeros.shape != weight.scales.shape:
        return f"zeros {list(weight.zeros.shape)} do not fit scales {[rows, groups]}"
    if weight.permutation is not None and weight.permutation.shape != (inputs,):
        return f"permutation {list(weight.permutation.shape)} does not fit {inputs} inputs"
    if bias is not None and bias.shape != (outputs,):
        return f"bias {list(bias.shape)} does not fit {outputs} outputs"
    return None
