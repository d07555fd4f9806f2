"""Some outputs of a linear layer, whatever form its weights have."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from engine.linear.packed import PackedLinear, unpacked
from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.linear.quantized import QuantizedLinear


def with_outputs(linear: nn.Module, outputs: Tensor) -> nn.Module:
    """A layer with these outputs alone (int64 [n], in this order), and memory of its own.

    Packed weights stay packed where they are quantized. Raises TypeError for a layer that is not linear.
    """
    bias = getattr(linear, "bias", None)
    bias = None if bias is None else bias[outputs]
    if isinstance(linear, PackedQuantizedLinear):
        return PackedQuantizedLinear(linear.packed.chosen(outputs), bias)
    if isinstance(linear, QuantizedLinear):
        weight = linear.quantized
        parts = {"codes": weight.codes[outputs], "scales": weight.scales[outputs]}
        zeros = None if weight.zeros is None else weight.zeros[outputs]
        return QuantizedLinear(replace(weight, zeros=zeros, **parts), bias)
    if isinstance(linear, PackedLinear):
        return linear_of(unpacked(linear.weight)[outputs], bias)
    if type(linear) is nn.Linear:
        return linear_of(linear.weight[outputs], bias)
    raise TypeError(f"{type(linear).__name__} is no linear layer")


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of these tensors, [out_features, in_features] and [out_features]."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
