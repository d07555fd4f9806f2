"""A rank's share of a Transformers model: some outputs of each linear layer, and some of the experts.

Whatever a model does between its layers, each rank does with whole rows. So any model that the engine serves
can be shared, and no layer has to know of it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.linear.experts import Experts
from engine.linear.packed import PANEL, PackedLinear, linear_of, plain_weight
from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.parallel.group import Columns, Ranks


class LinearShare(nn.Module):
    """The outputs of a linear layer that one rank computes. All of them get all outputs."""

    def __init__(self, part: nn.Module, columns: Columns, ranks: Ranks) -> None:
        super().__init__()
        self.part = part
        self.columns, self.ranks = columns, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.gather(self.part(x), self.columns)


class ExpertsShare(nn.Module):
    """The experts of a layer that one rank has. Each of them computes what it would among all experts, for
    the same rows, and results are summed as Transformers' `grouped_mm` sums them: with the same bits.
    """

    def __init__(self, whole: Any, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.own = ranks.own(whole.num_experts)
        # It leaves out what is for an expert that it does not have.
        self.part = whole.part(self.own) if isinstance(whole, Experts) else _experts(whole, self.own)
        parts = ranks.parts(whole.num_experts)
        self.owners = torch.tensor([rank for rank, part in enumerate(parts) for _ in part])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run rows [rows, hidden size] through their experts [rows, k], weighted by `top_k_weights`."""
        (rows, chosen), width = top_k_index.shape, hidden_states.shape[1]
        experts = top_k_index.reshape(-1, 1)  # each row once for each of its experts
        is_own = (experts >= self.own.start) & (experts < self.own.stop)
        places = torch.where(is_own, experts - self.own.start, len(self.own))
        part = self.part(hidden_states.repeat_interleave(chosen, 0), places, is_own.to(hidden_states.dtype))
        first = self.ranks.rank * width
        results = self.ranks.gather(part, Columns(range(first, first + width), self.ranks.size * width))
        owners = self.owners[experts.flatten()]
        results = results.view(rows * chosen, self.ranks.size, width)[torch.arange(rows * chosen), owners]
        results = (results * top_k_weights.reshape(-1, 1)).view(rows, chosen, width)
        return results.sum(1).to(hidden_states.dtype)


def model_share(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """The model as this rank runs it. It has no copies of weights that lie together in the whole model, and
    what it doesn't know it runs whole.
    """
    tensors = [*model.parameters(), *model.buffers()]
    share = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for path, module in list(share.named_modules()):
        if type(module) in (nn.Linear, PackedLinear, PackedQuantizedLinear, Conv1D):
            share.set_submodule(path, _linear_share(module, ranks))
        elif _are_experts(module) and module.num_experts >= ranks.size:
            share.set_submodule(path, ExpertsShare(module, ranks))
    return share


def _are_experts(module: nn.Module) -> bool:
    """Packed ones' `rest` has no weights."""
    fused = hasattr(module, "_is_expert_parallel") and any(True for _ in module.parameters(recurse=False))
    return isinstance(module, Experts) or fused


def _experts(whole: nn.Module, own: range) -> nn.Module:
    part: Any = copy.copy(whole)
    part._parameters = {
        name: nn.Parameter(weight[own.start : own.stop], requires_grad=False)
        for name, weight in whole.named_parameters(recurse=False)
    }
    part.num_experts = len(own)
    part._is_expert_parallel = True
    return part


def _linear_share(
    module: nn.Linear | PackedLinear | PackedQuantizedLinear | Conv1D, ranks: Ranks
) -> nn.Module:
    is_packed = isinstance(module, PackedLinear | PackedQuantizedLinear)
    count = module.out_features if is_packed else len(plain_weight(module))
    if count < ranks.size:
        return module
    own = ranks.own(count, PANEL)
    part = module.rows(own) if is_packed else _rows(module, own)
    return LinearShare(part, Columns(own, count), ranks)


def _rows(module: nn.Linear | Conv1D, own: range) -> nn.Linear:
    rows = slice(own.start, own.stop)
    return linear_of(plain_weight(module)[rows], None if module.bias is None else module.bias[rows])
