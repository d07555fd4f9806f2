"""Linear layers with quantized weights, and rounding to the nearest codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.linear.packed import linear_of
from engine.quantization.weight import E2M1_VALUES, INT4_ZERO, CodeFormat, QuantizedWeight


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


GROUPS = {
    CodeFormat.INT8: (0,),
    CodeFormat.INT4: (128, 64, 32),
    CodeFormat.FP8: (0,),
    CodeFormat.MXFP4: (32,),
}
"""Numbers of inputs that share a scale, best first; 0 stands for all inputs of a layer."""

_INPUT_GROUPS = {CodeFormat.INT8: 128, CodeFormat.INT4: 128}
"""Number of adjacent inputs rounded together to int8; a large input costs precision only within its group."""

_LARGEST_FP8 = 448.0
_LARGEST_E2M1 = 6.0


def group_size(format: CodeFormat, inputs: int) -> int | None:
    """Return the number of a layer's inputs that share a scale, or None if no group fits."""
    groups = (group or inputs for group in GROUPS[format])
    return next((group for group in groups if inputs % group == 0), None)


def round_to_nearest(weight: Tensor, format: CodeFormat, group_size: int) -> QuantizedWeight:
    """Round a weight [out_features, in_features] of any floating-point dtype."""
    groups = weight.float().unflatten(1, (-1, group_size))
    scales = _scales(groups, format)
    codes = _codes(groups / scales, format)
    input_group = _INPUT_GROUPS.get(format, 0)
    return QuantizedWeight(format, codes.flatten(1), scales.squeeze(2), input_group=input_group)


def _scales(groups: Tensor, format: CodeFormat) -> Tensor:
    if format is CodeFormat.MXFP4:
        return _mxfp4_scales(groups)
    if format is CodeFormat.INT4:  # the weight farthest from 0 gets code -8, which has no opposite
        return _nonzero(groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8)
    largest = 127 if format is CodeFormat.INT8 else _LARGEST_FP8
    return _nonzero(groups.abs().amax(2, keepdim=True) / largest)


def _mxfp4_scales(groups: Tensor) -> Tensor:
    """Return powers of two: OCP Microscaling Formats, section 6.3, or twice that, by the squared error.

    The former puts the largest weight between 4 and 8, and cuts it off above 6; the latter cuts nothing off.
    """
    largest = groups.abs().amax(2, keepdim=True)
    scales = _nonzero(torch.exp2(largest.log2().floor() - 2))
    cut, whole = (_mxfp4_error(groups, candidate) for candidate in (scales, 2 * scales))
    return torch.where(cut <= whole, scales, 2 * scales)


def _mxfp4_error(groups: Tensor, scales: Tensor) -> Tensor:
    values = (groups / scales).abs_()
    steps = 0.5 + 0.5 * (values >= 2) + (values >= 4)  # distances between E2M1's values
    rounded = (values / steps).round_().mul_(steps).clamp_(max=_LARGEST_E2M1)
    return (rounded - values).square_().sum(2, keepdim=True) * scales.square()


def _nonzero(scales: Tensor) -> Tensor:
    """Replace zero scales, which belong to groups of zeros, by 1."""
    return torch.where(scales == 0, 1.0, scales)


def _codes(values: Tensor, format: CodeFormat) -> Tensor:
    if format is CodeFormat.INT8:
        return values.round().clamp(-127, 127).to(torch.int8)
    if format is CodeFormat.INT4:
        return (values.round().clamp(-8, 7) + INT4_ZERO).to(torch.uint8)
    if format is CodeFormat.FP8:
        return values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
    magnitudes = torch.tensor(E2M1_VALUES[:8], device=values.device)
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(values.abs().clamp(max=_LARGEST_E2M1), between)
    return (codes + 8 * (values < 0)).to(torch.uint8)
