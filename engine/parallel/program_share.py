"""A rank's share of a program: its attention heads, its outputs of all products, and its experts.

Queries, keys and values are not gathered, since a rank attends with its own heads; nor are gates and values
of an MLP. So a layer gathers four times: before and after the attention's output product, and before and
after the MLP's down product. Every rank runs other mixers on whole rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.linear.packed import PANEL
from engine.model.program import Attention, Experts, Mlp, ModelProgram, Product, Rotation
from engine.parallel.division import LINEARS, LinearShare, columns_of, heads_of, moved, part_of, query_columns
from engine.parallel.group import Columns, Ranks
from engine.parallel.layers import ExpertsShare, are_experts

Prepare = Callable[[nn.Module], nn.Module]
"""A function that brings a linear layer into the form that the device's kernels read."""


def program_share(
    program: ModelProgram, ranks: Ranks, device: torch.device, prepare: Prepare = lambda part: part
) -> ModelProgram:
    """Return this rank's share of the program, on its device. Linear layers are prepared there. The whole
    program keeps its weights.
    """
    share: ModelProgram = _Divider(ranks, device, prepare).share(program)
    return share


class _Divider:
    def __init__(self, ranks: Ranks, device: torch.device, prepare: Prepare) -> None:
        self._ranks, self._device, self._prepare = ranks, device, prepare

    def share(self, whole: Any) -> Any:
        """Divide what can be divided, and move the rest to the device."""
        match whole:
            case Tensor():
                return whole.to(self._device)
            case Rotation():
                return whole
            case Attention():
                return self._attention(whole)
            case Product():
                return replace(whole, linears=tuple(map(self._whole_outputs, whole.linears)))
            case Mlp():
                return self._mlp(whole)
            case Experts():
                return self._experts(whole)
            case nn.Module():
                return self._placed(copy.deepcopy(whole))
            case tuple():
                return tuple(map(self.share, whole))
        if is_dataclass(whole) and not isinstance(whole, type):
            return replace(
                whole, **{each.name: self.share(getattr(whole, each.name)) for each in fields(whole)}
            )
        return whole

    def _attention(self, whole: Attention) -> Attention:
        dim, outputs = whole.head_dim, whole.inputs.outputs
        query_size = dim * (2 if whole.is_gated else 1)
        keys = (outputs - whole.heads * query_size) // 2 // dim
        own = heads_of(whole.heads, keys, self._ranks.size)[self._ranks.rank]
        gathered = query_columns(whole.heads, keys, self._ranks.size).times(dim)
        norms = {name: self.share(getattr(whole, name)) for name in ("query_norm", "key_norm")}
        return replace(
            whole,
            inputs=self._rows(whole.inputs, own.rows(dim, query_size, whole.heads, outputs)),
            output=self._gathering(whole.output, gathered),
            heads=len(own.queries),
            **norms,
        )

    def _mlp(self, whole: Mlp) -> Mlp:
        made = whole.gate_up.outputs // (2 if whole.is_gated else 1)
        columns = columns_of(made, self._ranks)
        own = columns.parts[self._ranks.rank]
        rows = [own, moved(own, made)] if whole.is_gated else [own]
        gate_up, down = self._rows(whole.gate_up, rows), self._gathering(whole.down, columns)
        return replace(whole, gate_up=gate_up, down=down)

    def _experts(self, whole: Experts) -> Experts:
        experts = whole.holder.experts
        divides = are_experts(experts) and experts.num_experts >= self._ranks.size
        share = ExpertsShare(experts, self._ranks) if divides else copy.deepcopy(experts)
        names = ("router", "preferences", "shared_gate")
        tensors = {name: self.share(getattr(whole, name)) for name in names}
        return replace(whole, holder=SimpleNamespace(experts=share.to(self._device)), **tensors)

    def _rows(self, whole: Product, rows: Sequence[range]) -> Product:
        """Return a product with only these outputs, which stay on this rank."""
        parts, first = [], 0
        for linear in whole.linears:
            last = first + linear.out_features
            own = [range(max(each.start, first) - first, min(each.stop, last) - first) for each in rows]
            if own := [each for each in own if len(each)]:
                parts.append(self._placed(part_of(linear, own)))
            first = last
        factors = whole.multipliers
        if factors is not None:
            factors = torch.cat([factors[each.start : each.stop] for each in rows]).to(self._device)
        return replace(whole, linears=tuple(parts), multipliers=factors)

    def _gathering(self, whole: Product, inputs: Columns) -> Product:
        """Return a product whose input is gathered first: each rank has some columns, `inputs`."""
        (linear,) = whole.linears
        return replace(whole, linears=(self._linear(linear, inputs),))

    def _whole_outputs(self, linear: Any) -> nn.Module:
        """Return a layer with all outputs on every rank. For a small layer a gather would not pay."""
        is_small = type(linear) not in LINEARS or linear.out_features < PANEL * self._ranks.size
        return self._placed(copy.deepcopy(linear)) if is_small else self._linear(linear, None)

    def _linear(self, linear: Any, inputs: Columns | None) -> nn.Module:
        columns = columns_of(linear.out_features, self._ranks)
        share = LinearShare(linear, columns, self._ranks, inputs)
        share.part = self._placed(share.part)
        return share

    def _placed(self, part: nn.Module) -> nn.Module:
        return self._prepare(part.to(self._device))
