"""The outputs of a model's products that each rank computes: those of its attention heads, and even parts.

A Transformers model is divided layer by layer: some outputs of each linear layer, and some of the experts.
Between these layers, every rank runs the model's own code on whole rows. So any model that the engine serves
can be divided, without changes to its layers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.linear.experts import ExpertsModule, are_experts
from engine.linear.packed import PANEL, PackedLinear, linear_of, plain_weight, rows_of
from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.linear.quantized import QuantizedLinear
from engine.parallel.group import Columns, Ranks

LINEARS = (nn.Linear, Conv1D, PackedLinear, PackedQuantizedLinear, QuantizedLinear)
"""The linear layers that `part_of` divides."""


class Heads(NamedTuple):
    """One rank's attention heads (`queries`), and the KV heads that they read, each equally often."""

    queries: range
    keys: range

    def rows(self, size: int, query_size: int, num_queries: int, outputs: int, sides: int = 2) -> list[range]:
        """Return these heads' outputs of a fused QKV product: `num_queries` queries of `query_size` rows
        (more than `size` if each has a gate), then keys and values, or fewer `sides`, of `size` rows a head.
        """
        first_key = num_queries * query_size
        queries, keys = times(self.queries, query_size), moved(times(self.keys, size), first_key)
        step = (outputs - first_key) // max(1, sides)
        return [queries, *(moved(keys, side * step) for side in range(sides))]


def heads_of(queries: int, keys: int, size: int) -> list[Heads]:
    """Divide attention heads (`queries`) and KV heads (`keys`) among `size` ranks. With more ranks than KV
    heads, several ranks keep copies of one KV head and divide its attention heads.
    """
    group, found = queries // keys, []
    owners = [own.start for own in keys_of(keys, size)]
    for rank, own in enumerate(keys_of(keys, size)):
        place, sharing = rank - owners.index(own.start), owners.count(own.start)
        first, count = own.start * group, len(own) * group
        queries_of = range(first + place * count // sharing, first + (place + 1) * count // sharing)
        found.append(Heads(queries_of, own))
    return found


def keys_of(keys: int, size: int) -> list[range]:
    """Return the KV heads of each of `size` ranks."""
    firsts = [rank * keys // size for rank in range(size + 1)]
    return [range(first, max(last, first + 1)) for first, last in itertools.pairwise(firsts)]


def query_columns(queries: int, keys: int, size: int) -> Columns:
    """Return each rank's attention heads."""
    return Columns(tuple(heads.queries for heads in heads_of(queries, keys, size)))


def times(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)


def part_of(linear: nn.Module, rows: Sequence[range]) -> Any:
    """Return a linear layer with only these outputs. One range of a plain layer is a view, not a copy."""
    if isinstance(linear, PackedLinear | PackedQuantizedLinear):
        return linear.rows(rows)
    if isinstance(linear, QuantizedLinear):
        weight = linear.quantized
        return QuantizedLinear(
            replace(
                weight,
                codes=rows_of(weight.codes, rows),
                scales=rows_of(weight.scales, rows),
                zeros=None if weight.zeros is None else rows_of(weight.zeros, rows),
            ),
            None if linear.bias is None else rows_of(linear.bias, rows),
        )
    assert isinstance(linear, nn.Linear | Conv1D)
    bias = None if linear.bias is None else rows_of(linear.bias, rows)
    return linear_of(rows_of(plain_weight(linear), rows), bias)


class LinearShare(nn.Module):
    """A linear layer that computes this rank's outputs and gathers the outputs of all ranks."""

    def __init__(self, linear: nn.Module, columns: Columns, ranks: Ranks) -> None:
        """Take this rank's `columns` of `linear`."""
        super().__init__()
        self.part = part_of(linear, [columns.parts[ranks.rank]])
        self._columns, self._ranks = columns, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.gather(self.part(x), self._columns)


class ExpertsShare(nn.Module):
    """The experts of a layer that one rank has. Each computes the same as among all experts, for the same
    rows. Results are summed as among all experts, so they have the same bits.
    """

    owners: Tensor

    def __init__(self, whole: Any, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks
        parts = ranks.columns(whole.num_experts).parts
        self.own = parts[ranks.rank]
        # The part skips rows with place len(own): their experts are on other ranks.
        self.part = whole.part(self.own) if isinstance(whole, ExpertsModule) else _experts(whole, self.own)
        owners = torch.tensor([rank for rank, part in enumerate(parts) for _ in part])
        self.register_buffer("owners", owners, persistent=False)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run rows [rows, hidden size] through their experts [rows, k], weighted by `top_k_weights`."""
        (rows, chosen), width = top_k_index.shape, hidden_states.shape[1]
        experts = top_k_index.reshape(-1, 1)  # one line for each row and expert
        is_own = (experts >= self.own.start) & (experts < self.own.stop)
        places = torch.where(is_own, experts - self.own.start, len(self.own))
        part = self.part(hidden_states.repeat_interleave(chosen, 0), places, is_own.to(hidden_states.dtype))
        size = self._ranks.size
        each = Columns(tuple(range(rank * width, (rank + 1) * width) for rank in range(size)))
        results = self._ranks.gather(part, each).view(rows * chosen, size, width)
        lines = torch.arange(rows * chosen, device=part.device)
        results = results[lines, self.owners[experts.flatten()]]
        if isinstance(self.part, ExpertsModule):
            return self.part.add_up(results, top_k_weights)
        results = (results * top_k_weights.reshape(-1, 1)).view(rows, chosen, width)
        return results.sum(1).to(hidden_states.dtype)


def model_share(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """Return the model as this rank runs it. Modules of other types run whole on every rank."""
    tensors = [*model.parameters(), *model.buffers()]
    share = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for path, module in list(share.named_modules()):
        if type(module) in LINEARS:
            share.set_submodule(path, _linear_share(module, ranks))
        elif are_experts(module) and module.num_experts >= ranks.size:
            share.set_submodule(path, ExpertsShare(module, ranks))
    return share


def _experts(whole: nn.Module, own: range) -> nn.Module:
    part: Any = copy.copy(whole)
    part._parameters = {
        name: nn.Parameter(weight[own.start : own.stop], requires_grad=False)
        for name, weight in whole.named_parameters(recurse=False)
    }
    part.num_experts = len(own)
    part._is_expert_parallel = True
    return part


def _linear_share(module: Any, ranks: Ranks) -> nn.Module:
    has_count = hasattr(module, "out_features")
    count = module.out_features if has_count else len(plain_weight(module))
    return module if count < ranks.size else LinearShare(module, ranks.columns(count, PANEL), ranks)
