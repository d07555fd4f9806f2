"""A rank's share of a Transformers model: linear layers with some of their outputs, by the model's plan."""

from __future__ import annotations

import copy
import re

from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.errors import UnsupportedModelError
from engine.linear.packed import PackedLinear
from engine.parallel.group import Ranks

_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of the plan's modules that each rank has whole: norms of single heads, and embeddings, of which a
step reads a few rows."""


class LinearShare(nn.Module):
    """The outputs of a linear layer that one rank computes.

    With `gathers_input` the ranks have an input's columns between them, with `gathers_output` all of them
    get all outputs.
    """

    def __init__(self, part: nn.Module, ranks: Ranks, *, gathers_input: bool, gathers_output: bool) -> None:
        super().__init__()
        self.part = part
        self.ranks = ranks
        self.gathers_input, self.gathers_output = gathers_input, gathers_output

    def forward(self, x: Tensor) -> Tensor:
        if self.gathers_input:
            x = self.ranks.gather(x)
        x = self.part(x)
        return self.ranks.gather(x) if self.gathers_output else x


def model_share(model: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    """The model as this rank runs it. It shares the whole one's weights as far as its own lie together there.

    Raises UnsupportedModelError that names what can't be divided.
    """
    name = model.config.model_type
    plan = model.tp_plan
    if not any(style == "rowwise" for style in plan.values()):
        raise UnsupportedModelError(f"{name}: it has no tensor-parallel plan that splits heads over ranks")
    tensors = [*model.parameters(), *model.buffers()]
    share = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    patterns = {re.compile(key.replace(".", r"\.").replace("*", r"\d+")): plan[key] for key in plan}
    for path, module in list(share.named_modules()):
        for pattern, style in patterns.items():
            if pattern.fullmatch(path) and style not in _WHOLE:
                share.set_submodule(path, _share(module, style, ranks, f"{name}: {path}"))
    return share


def _share(module: nn.Module, style: str, ranks: Ranks, name: str) -> nn.Module:
    if not isinstance(module, nn.Linear | PackedLinear) or style not in (
        "colwise",
        "rowwise",
        "colwise_gather_output",
    ):
        raise UnsupportedModelError(f"{name}: the tensor-parallel plan's {style!r} is not supported")
    if module.out_features % ranks.size:
        if style == "colwise_gather_output":
            return module  # each rank computes all of a vocabulary that can't be divided
        outputs = f"its {module.out_features} outputs cannot be divided"
        raise UnsupportedModelError(f"{name}: {outputs} among {ranks.size} tensor-parallel ranks")
    own = ranks.own(module.out_features)
    part = module.rows(own) if isinstance(module, PackedLinear) else _rows(module, own)
    return LinearShare(part, ranks, gathers_input=style == "rowwise", gathers_output=style != "colwise")


def _rows(linear: nn.Linear, rows: range) -> nn.Linear:
    part = nn.Linear(linear.in_features, len(rows), bias=linear.bias is not None, device="meta")
    part.weight = nn.Parameter(linear.weight[rows.start : rows.stop], requires_grad=False)
    if linear.bias is not None:
        part.bias = nn.Parameter(linear.bias[rows.start : rows.stop], requires_grad=False)
    return part
