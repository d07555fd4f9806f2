"""Experts: linear layers of which each row is multiplied by its own, packed for our kernel (`routed.h`).

An expert's weights are read once for all its rows. A row's result has the same bits in every batch.
`split_experts` gives experts that Transformers holds as one tensor linear layers, which can be quantized like
any other, and `join_experts` packs those; `pack_experts` packs the tensor itself.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from engine.linear.packed import QuantizedArgs, RoutedArgs, library, linear_of, operator, pack
from engine.linear.packed_quantized import FORMATS, PackedQuantizedLinear, packed_args
from native.threads import gomp_parallel


def _routed(
    x: Tensor, experts: Tensor, in_features: int, out_features: int, num_experts: int
) -> tuple[RoutedArgs, Tensor]:
    """Return the kernel's arguments and its output. `x` and `experts` must be contiguous and outlive them."""
    rows = experts.numel()
    if x.shape[-1] != in_features or x.dtype is not torch.bfloat16 or (rows and rows % len(x)):
        raise ValueError(
            f"not bfloat16 inputs of {in_features} features for {rows} experts: {x.dtype} {tuple(x.shape)}"
        )
    out = torch.empty(rows, out_features, dtype=torch.bfloat16)
    args = RoutedArgs(
        x.data_ptr(),
        experts.data_ptr(),
        out.data_ptr(),
        rows,
        max(1, rows // max(1, len(x))),
        num_experts,
        in_features,
        out_features,
    )
    return args, out


def _run(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    x, experts = x.contiguous(), experts.contiguous()
    args, out = _routed(x, experts, 2 * weight.shape[2], out_features, len(weight))
    library().tandem_routed_linear(
        ctypes.addressof(args),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
        gomp_parallel(),
    )
    return out


def _first(parts: Sequence[Tensor | None], numbers: Sequence[int]) -> QuantizedArgs:
    """Return the first expert's weights, from the arguments of `packed_args` for all experts."""
    return packed_args([None if each is None else each[0] for each in parts], numbers)


def _run_quantized(
    x: Tensor, experts: Tensor, parts: Sequence[Tensor | None], numbers: Sequence[int]
) -> Tensor:
    x, experts = x.contiguous(), experts.contiguous()
    (words, scales, *_), first = parts, _first(parts, numbers)
    assert words is not None and scales is not None
    args, out = _routed(x, experts, first.in_features, first.out_features, len(words))
    library().tandem_routed_quantized_linear(
        ctypes.addressof(args),
        ctypes.addressof(first),
        words[0, 0].numel(),
        scales[0, 0].numel(),
        torch.get_num_threads(),
        gomp_parallel(),
    )
    return out


_routed_linear = operator(
    "routed_linear(Tensor x, Tensor experts, Tensor weight, Tensor? bias, int outputs) -> Tensor",
    _run,
    lambda x, experts, weight, bias, outputs: x.new_empty((experts.numel(), outputs)),
)
_routed_quantized_linear = operator(
    "routed_quantized_linear(Tensor x, Tensor experts, Tensor?[] parts, int[] numbers) -> Tensor",
    _run_quantized,
    lambda x, experts, parts, numbers: x.new_empty((experts.numel(), numbers[-1])),
)


class Routed(nn.Module):
    """A module whose parameters and buffers have the experts as their first dimension."""

    def part(self, own: range) -> Self:
        """Return a module with only the experts `own`, in the same memory."""
        part = copy.copy(self)
        part._parameters = {
            name: each if each is None else nn.Parameter(each[own.start : own.stop], requires_grad=False)
            for name, each in self._parameters.items()
        }
        part._buffers = {
            name: each if each is None else each[own.start : own.stop] for name, each in self._buffers.items()
        }
        return part


class RoutedLinear(Routed):
    """A linear layer for each expert; `weight` is bfloat16 [experts, out / 64, in / 2, 64, 2], padded."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Pack `weights`, bfloat16 [out_features, in_features] each. `bias` is [experts, out_features]."""
        super().__init__()
        self.out_features = weights[0].shape[0]
        self.weight = nn.Parameter(torch.stack([pack(weight) for weight in weights]), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Return [rows, out_features] for `x` [rows / n, in_features], each row of `x` for n experts.

        `experts` is int64 [rows]; an index outside the experts gives zeros.
        """
        return _routed_linear(x, experts, self.weight, self.bias, self.out_features)


class RoutedQuantizedLinear(Routed):
    words: Tensor
    scales: Tensor
    minima: Tensor | None
    inputs: Tensor | None

    def __init__(self, linears: Sequence[PackedQuantizedLinear]) -> None:
        """Stack the experts' packed weights, which are alike except for the order of their inputs."""
        super().__init__()
        first = linears[0]
        self.format, self.input_group = first.format, first.input_group
        self.out_features = first.out_features
        for name in ("words", "scales", "minima", "inputs"):
            parts = [getattr(linear, name) for linear in linears]
            self.register_buffer(name, None if parts[0] is None else torch.stack(parts))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases), requires_grad=False) if biases else None

    @property
    def num_experts(self) -> int:
        return len(self.words)

    @property
    def _parts(self) -> tuple[list[Tensor | None], list[int]]:
        parts = [self.words, self.scales, self.minima, self.inputs, self.bias]
        return parts, [FORMATS.index(self.format), self.input_group, self.out_features]

    def first(self) -> QuantizedArgs:
        """Return the first expert's weights, for native callers. They point to this layer's memory."""
        return _first(*self._parts)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        return _routed_quantized_linear(x, experts, *self._parts)


Pack = Callable[[Iterable[nn.Module]], nn.Module]
"""A function that packs the linear layers of a layer's experts into one module."""

_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
"""Attributes that Transformers' `use_experts_implementation` gives the expert modules that it supports."""


class ExpertsModule(nn.Module):
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
        return self.add_up(rows, weights)

    def add_up(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of each row's results, times their `weights` [rows, n]."""
        weighted = rows.unflatten(0, (-1, weights.shape[1])) * weights.unsqueeze(-1)
        summed: Tensor = weighted.sum(1)
        return summed.to(rows.dtype)

    @property
    def num_experts(self) -> int:
        count: int = self.first.num_experts
        return count

    def part(self, own: range) -> ExpertsModule:
        """Return only the experts `own`, numbered from 0."""
        return type(self)(self.first.part(own), self.second.part(own), self.rest)


def are_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts' weights; the `rest` of packed experts does not."""
    return isinstance(module, ExpertsModule) or is_fused(module)


def fused_experts(model: nn.Module, *, by_kernel: bool = True) -> dict[str, Any]:
    """Return fused experts by path; with `by_kernel`, only those that our kernel can multiply by."""
    fused = {path: module for path, module in model.named_modules() if is_fused(module)}
    if not by_kernel:
        return fused
    return {path: each for path, each in fused.items() if all(_fits(_weights(each, n)) for n in _names(each))}


def split_experts(model: nn.Module, *, by_kernel: bool = True) -> None:
    """Give each expert its own linear layers, which share the fused tensors' memory where they can."""
    for path, experts in fused_experts(model, by_kernel=by_kernel).items():
        first, second = (_linears(experts, name) for name in _names(experts))
        model.set_submodule(path, ExpertsModule(first, second, _rest(experts)))


def join_experts(model: nn.Module, pack: Pack | None = None) -> None:
    """Pack the layers that `split_experts` made, after their quantization, by `pack` or for our kernel."""
    for experts in [module for module in model.modules() if isinstance(module, ExpertsModule)]:
        for name in ("first", "second"):
            linears = getattr(experts, name)
            if isinstance(linears, nn.ModuleList):
                setattr(experts, name, (pack or _joined)(linears))


def pack_experts(model: nn.Module) -> None:
    """Pack fused experts, freeing their tensors."""
    for path, experts in fused_experts(model).items():
        parts, rest = fused_parts(experts)
        first, second = (RoutedLinear([*weights], biases) for weights, biases in parts)
        model.set_submodule(path, ExpertsModule(first, second, rest))


def fused_parts(experts: Any) -> tuple[list[tuple[Tensor, Tensor | None]], nn.Module]:
    """Return both layers' weights [experts, out_features, in_features] and biases, and the module without
    them.
    """
    parts = [(_weights(experts, name), _biases(experts, name)) for name in _names(experts)]
    return parts, _rest(experts)


def _linears(experts: Any, name: str) -> nn.ModuleList:
    weights, biases = _weights(experts, name), _biases(experts, name)
    each_bias = [None] * len(weights) if biases is None else biases
    return nn.ModuleList(linear_of(*each) for each in zip(weights, each_bias, strict=True))


def _joined(linears: Iterable[nn.Module]) -> RoutedLinear | RoutedQuantizedLinear:
    layers: list[Any] = list(linears)
    quantized = [linear for linear in layers if isinstance(linear, PackedQuantizedLinear)]
    if quantized:
        return RoutedQuantizedLinear(quantized)
    biases = [linear.bias for linear in layers if linear.bias is not None]
    return RoutedLinear([linear.weight for linear in layers], torch.stack(biases) if biases else None)


def is_fused(module: Any) -> bool:
    """Return whether these are Transformers' experts, which hold all experts' weights as one tensor."""
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
