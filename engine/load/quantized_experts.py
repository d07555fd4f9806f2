"""Quantized experts that the model holds as one tensor: they stay quantized, each for itself, or fill it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.linear.experts import split_experts
from engine.linear.quantized import QuantizedLinear
from engine.quantization.weight import QuantizedWeight

_INPUTS, _OUTPUTS = ("gate_proj", "up_proj"), "down_proj"
"""An expert's layers, as most models name them; the model joins the first two."""


def take_experts(
    weights: dict[str, QuantizedWeight], known: Mapping[str, Any]
) -> dict[str, list[QuantizedWeight]]:
    """Takes the weights of `known` experts' layers and returns them by the names of the model's tensors.

    It leaves those that are not all there, or not quantized alike.
    """
    taken: dict[str, list[QuantizedWeight]] = {}
    for path, experts in known.items():
        each = [f"{path}.{number}" for number in range(experts.num_experts)]
        names = [f"{expert}.{layer}" for expert in each for layer in (*_INPUTS, _OUTPUTS)]
        if not (experts.has_gate and experts.is_concatenated and weights.keys() >= set(names)):
            continue
        first = [_joined(*(weights[f"{expert}.{layer}"] for layer in _INPUTS)) for expert in each]
        second = [weights[f"{expert}.{_OUTPUTS}"] for expert in each]
        whole = [weight for weight in first if weight is not None]
        if len(whole) == len(each) and _are_alike(whole) and _are_alike(second):
            taken |= {f"{path}.gate_up_proj": whole, f"{path}.{_OUTPUTS}": second}
            for name in names:
                del weights[name]
    return taken


def set_experts(model: nn.Module, weights: Mapping[str, Iterable[QuantizedWeight]]) -> None:
    """Gives all experts layers of their own, with these weights by the names of the model's tensors."""
    if not weights:
        return
    split_experts(model)
    for name, each in weights.items():
        path, _, tensor = name.rpartition(".")
        experts = model.get_submodule(path)
        linears = experts.second if tensor == _OUTPUTS else experts.first
        assert isinstance(linears, nn.ModuleList)
        for number, weight in enumerate(each):
            linears[number] = QuantizedLinear(weight, linears[number].bias)


def fill_experts(
    model: nn.Module, weights: dict[str, Iterable[QuantizedWeight]], dtype: torch.dtype, device: torch.device
) -> None:
    """Gives the model's tensors of these names the weights' values, on `device`. Takes the weights, each as
    soon as it is used: in float32 all need several times the memory.
    """
    for name in list(weights):
        path, _, tensor = name.rpartition(".")
        experts = model.get_submodule(path)
        dense = torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device)
        for values, weight in zip(dense, weights.pop(name), strict=True):
            dequantized = weight.dequantized()
            values.copy_(dequantized.T if experts.is_transposed else dequantized)
        setattr(experts, tensor, nn.Parameter(dense, requires_grad=False))


def _joined(gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight | None:
    """The outputs of both; None where their inputs are not quantized alike."""
    orders = [weight.permutation for weight in (gate, up) if weight.permutation is not None]
    if not _are_alike([gate, up]) or (orders and not torch.equal(*orders)):
        return None
    zeros = None if gate.zeros is None or up.zeros is None else torch.cat([gate.zeros, up.zeros])
    codes, scales = torch.cat([gate.codes, up.codes]), torch.cat([gate.scales, up.scales])
    return replace(gate, codes=codes, scales=scales, zeros=zeros)


def _are_alike(weights: Sequence[QuantizedWeight]) -> bool:
    def kind(weight: QuantizedWeight) -> tuple[object, ...]:
        optional: tuple[Tensor | None, ...] = weight.zeros, weight.permutation
        return (
            weight.format,
            weight.input_group,
            weight.codes.shape[1],
            weight.group_size,
            *(each is None for each in optional),
        )

    return len({kind(weight) for weight in weights}) == 1
