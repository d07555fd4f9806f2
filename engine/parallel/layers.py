"""A rank's share of a Transformers model: some outputs of each linear layer, and some of the experts.

Between these layers, every rank runs the model's own code on whole rows. So any model that the engine serves
can be divided, without changes to its layers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.linear.experts import ExpertsModule, are_experts
from engine.linear.packed import PANEL, plain_weight
from engine.parallel.division import LINEARS, LinearShare
from engine.parallel.group import Columns, Ranks


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
