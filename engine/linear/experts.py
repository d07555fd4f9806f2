"""Experts that Transformers holds as one tensor, as linear layers of our own.

`split_experts` gives each expert linear layers, which can be quantized like any other; `join_experts` packs
these layers for our kernel. `pack_experts` packs the fused tensor itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.linear.packed import linear_of
from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.linear.routed import RoutedLinear, RoutedQuantizedLinear

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that Transformers' `use_experts_implementation` gives the expert modules that it supports."""


class Experts(nn.Module):
    """The weighted sum of each row's experts, computed like in the module that it replaces.

    `first` and `second` are lists of each expert's linear layers, or one module for all experts once packed.
    """

    first: Any
    second: Any
    rest: Any

    def __init__(self, first: nn.Module, second: nn.Module, rest: nn.Module) -> None:
        """Make the experts. `rest` has the activation between the layers, without weights."""
        super().__init__()
        self.first, self.second, self.rest = first, second, rest

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the rows' outputs. `hidden` is [rows, features], `chosen` int64 and `weights` [rows, n]."""
        experts = chosen.flatten()
        rows = self.first(hidden, experts)
        rows = self.rest._apply_gate(rows) if self.rest.has_gate else self.rest.act_fn(rows)
        rows = self.second(rows, experts)
        if getattr(self.rest, "has_post_expert_norm", False):
            rows = self.rest.post_expert_norm(rows)
        weighted = rows.unflatten(0, (-1, chosen.shape[1])) * weights.unsqueeze(-1)
        summed: Tensor = weighted.sum(1)
        return summed.to(hidden.dtype)

    @property
    def num_experts(self) -> int:
        count: int = self.first.num_experts
        return count

    def part(self, own: range) -> Experts:
        """Return only the experts `own`, numbered from 0."""
        return Experts(self.first.part(own), self.second.part(own), self.rest)


def fused_experts(model: nn.Module, *, by_kernel: bool = True) -> dict[str, Any]:
    """Return fused experts by path; with `by_kernel`, only those that our kernel can multiply by."""
    fused = {path: module for path, module in model.named_modules() if _is_fused(module)}
    if not by_kernel:
        return fused
    return {path: each for path, each in fused.items() if all(_fits(_weights(each, n)) for n in _names(each))}


def split_experts(model: nn.Module) -> None:
    """Give each expert its own linear layers, which share the fused tensors' memory where they can."""
    for path, experts in fused_experts(model).items():
        first, second = (_linears(experts, name) for name in _names(experts))
        model.set_submodule(path, Experts(first, second, _rest(experts)))


def join_experts(model: nn.Module) -> None:
    """Pack the layers that `split_experts` made, after their quantization."""
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for name in ("first", "second"):
            linears = getattr(experts, name)
            if isinstance(linears, nn.ModuleList):
                setattr(experts, name, _joined(linears))


def pack_experts(model: nn.Module) -> None:
    """Pack fused experts, freeing their tensors."""
    for path, experts in fused_experts(model).items():
        first, second = (
            RoutedLinear(_weights(experts, name), _biases(experts, name)) for name in _names(experts)
        )
        model.set_submodule(path, Experts(first, second, _rest(experts)))


def _linears(experts: Any, name: str) -> nn.ModuleList:
    weights, biases = _weights(experts, name), _biases(experts, name)
    each_bias = [None] * len(weights) if biases is None else biases
    return nn.ModuleList(linear_of(*each) for each in zip(weights, each_bias, strict=True))


def _joined(linears: nn.ModuleList) -> RoutedLinear | RoutedQuantizedLinear:
    quantized = [linear for linear in linears if isinstance(linear, PackedQuantizedLinear)]
    if quantized:
        return RoutedQuantizedLinear(quantized)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return RoutedLinear([linear.weight for linear in linears], torch.stack(biases) if biases else None)


def _is_fused(module: Any) -> bool:
    if not all(hasattr(module, name) for name in _DECLARED):
        return False
    return all(hasattr(module, name) for name in _names(module))


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _weights(experts: Any, name: str) -> Tensor:
    """Return the weights as [experts, out_features, in_features]."""
    weights: Tensor = getattr(experts, name).detach()
    return weights.transpose(1, 2) if experts.is_transposed else weights


def _biases(experts: Any, name: str) -> Tensor | None:
    return getattr(experts, f"{name}_bias").detach() if experts.has_bias else None


def _fits(weights: Tensor) -> bool:
    return weights.dtype is torch.bfloat16 and weights.shape[2] % 2 == 0


def _rest(experts: Any) -> nn.Module:
    for name in _names(experts):
        delattr(experts, name)
        if experts.has_bias:
            delattr(experts, f"{name}_bias")
    return experts
