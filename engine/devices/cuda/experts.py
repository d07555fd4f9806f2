"""Experts on a CUDA device: each product of all experts is one launch, with weights as they are stored.

A row's result has the same bits in every batch: a tile has rows of one expert, and sums as a tile of any
size does.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from engine.devices.cuda.buckets import MOST_ROWS
from engine.devices.cuda.expert_kernels import TILE_FIELDS, assign, combine, route
from engine.devices.cuda.products import ROWS, TENSORS, Routes, Tiled, TiledLinear, fits, tiled
from engine.linear.experts import ExpertsModule, Routed, are_experts, fused_parts, join_experts
from engine.linear.quantized import QuantizedLinear
from engine.model import program
from engine.model.describe import gate_of
from engine.model.program import Activation
from engine.triton_support import ceil_div, power_of_two

_FEW_ROWS = 16
"""Rows of a tile if experts have few each, which are all the rows that a matrix unit takes at least."""
_FEW_EACH = 32
"""The most rows of an expert on average for which small tiles pay, though weights may be read twice."""
_BLOCK = 1024
_BY_KERNEL = Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU


def choose_experts(experts: program.Experts, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows' experts, int64 [rows, n], and their weights."""
    rows, count = logits.shape
    chosen = torch.empty((rows, experts.chosen), dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(chosen.shape, dtype=dtype if experts.rounds else torch.float32)
    route[(rows,)](
        logits,
        experts.preferences,
        chosen,
        weights,
        experts.least_sum,
        experts.scaling,
        EXPERTS=count,
        PADDED=power_of_two(count),
        CHOSEN=experts.chosen,
        WIDTH=power_of_two(experts.chosen),
        GROUPS=experts.groups,
        OPEN=experts.open_groups,
        SCORE=experts.score.value,
        ROUNDS=experts.rounds,
        NORMALIZES=experts.normalizes,
        num_warps=4,
    )
    return chosen, weights


def routes_of(chosen: Tensor, num_experts: int) -> Routes:
    """Return the tiles of the rows [rows, n] that chose these experts; an expert outside has no tile."""
    count = chosen.numel()
    is_few = len(chosen) <= MOST_ROWS and count <= _FEW_EACH * num_experts
    rows = _FEW_ROWS if is_few else ROWS
    most = min(count, count // rows + num_experts)
    places = torch.empty(count, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty((most, TILE_FIELDS.value), dtype=torch.int32, device=chosen.device)
    assign[(num_experts,)](
        chosen.contiguous(),
        places,
        tiles,
        count,
        most,
        EXPERTS=num_experts,
        PADDED=power_of_two(num_experts + 1),
        ROWS=rows,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Routes(tiles, places, rows)


def add_up(
    rows: Tensor, weights: Tensor, beside: Tensor | None = None, opening: Tensor | None = None
) -> Tensor:
    """Add up the results of each row's experts, times their `weights` [rows, n], and the row `beside` them,
    times the sigmoid of its gate in `opening` [rows, 1].
    """
    size = rows.shape[1]
    out = rows.new_empty((len(weights), size))
    combine[(len(out), ceil_div(size, _BLOCK))](
        rows,
        weights.contiguous(),
        beside,
        opening,
        out,
        CHOSEN=weights.shape[1],
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


class RoutedTiles(Routed, Tiled):
    """A linear layer for each expert."""

    @classmethod
    def of(cls, linears: Iterable[nn.Module], dtype: torch.dtype) -> RoutedTiles:
        """Stack layers, quantized alike or plain ones. Weights that the kernel does not fit become plain."""
        layers = list(linears)
        quantized = [each.quantized for each in layers if isinstance(each, QuantizedLinear)]
        if quantized and all(map(fits, quantized)):
            parts = [TiledLinear.quantized(each.quantized, each.bias) for each in layers]  # type: ignore[arg-type,union-attr]
        else:
            plain = [each.plain(dtype) if isinstance(each, QuantizedLinear) else each for each in layers]
            parts = [TiledLinear.plain(each.weight.detach(), each.bias) for each in plain]  # type: ignore[arg-type,union-attr]
        there = (name for name in TENSORS if getattr(parts[0], name) is not None)
        stacked = {name: torch.stack([getattr(part, name) for part in parts]) for name in there}
        return cls(parts[0].format, parts[0].depth, **stacked)

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def forward(self, x: Tensor, routes: Routes | Tensor, gate: Activation | None = None) -> Tensor:
        """Return a row for each place in `routes`; rows of experts outside are undefined. Each row of `x` is
        for equally many, in a sequence. A `gate` is that of `launch`. In the host's memory, `routes` are the
        experts [rows].
        """
        if isinstance(routes, Tensor):
            return self._by_torch(x, routes)
        out = x.new_empty((len(routes.places), self.out_features))
        is_few, tiles = routes.rows < ROWS, len(routes.tiles)
        self.launch(x.contiguous(), out, tiles, is_few=is_few, routes=routes, gate=gate)
        return out

    def _by_torch(self, x: Tensor, experts: Tensor) -> Tensor:
        experts = experts.flatten()
        x = x.repeat_interleave(len(experts) // len(x), 0)
        out = x.new_zeros((len(x), self.out_features))
        for expert in experts.unique().tolist():
            one, own = self.part(range(expert, expert + 1)), experts == expert
            bias = None if one.bias is None else one.bias[0]
            out[own] = linear(x[own], one.values().to(x.dtype), bias)
        return out


class TiledExperts(ExpertsModule):
    """Experts whose layers are `RoutedTiles`, in four launches if the second product can activate."""

    def forward(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
        beside: Tensor | None = None,
        opening: Tensor | None = None,
    ) -> Tensor:
        if not len(hidden):
            return hidden
        routes = routes_of(chosen, self.num_experts)
        rows, gate = self.first(hidden, routes), self._gate
        rows = self.second(rows if gate is not None else self._activate(rows), routes, gate)
        if getattr(self.rest, "has_post_expert_norm", False):
            rows = self.rest.post_expert_norm(rows)
        return self.add_up(rows, weights, beside, opening)

    def add_up(
        self,
        rows: Tensor,
        weights: Tensor,
        beside: Tensor | None = None,
        opening: Tensor | None = None,
    ) -> Tensor:
        return add_up(rows, weights, beside, opening)

    @property
    def _gate(self) -> Activation | None:
        """The activation of the gates, if the second product has a kernel for it."""
        activation = gate_of(self.rest) if self.rest.has_gate else None
        if activation is Activation.CLAMPED_SWIGLU and self.second.order is not None:
            return None
        return activation if activation in _BY_KERNEL else None

    def _activate(self, made: Tensor) -> Tensor:
        active: Tensor = self.rest._apply_gate(made) if self.rest.has_gate else self.rest.act_fn(made)
        return active


def tile_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the model's experts, joining those that were split, and freeing their weights."""
    join_experts(model, partial(RoutedTiles.of, dtype=dtype))
    for path, module in list(model.named_modules()):
        if are_experts(module):
            model.set_submodule(path, tiled_experts(module))


def tiled_experts(experts: Any) -> TiledExperts:
    """Return experts that run by our kernel. Fused ones lose their weights."""
    if isinstance(experts, ExpertsModule):
        return TiledExperts(experts.first, experts.second, experts.rest)
    parts, rest = fused_parts(experts)
    first, second = (RoutedTiles.plain(weight.contiguous(), bias) for weight, bias in parts)
    return TiledExperts(first, second, rest)


def tiled_part(part: nn.Module, dtype: torch.dtype, *, plain: bool) -> nn.Module:
    """Return a rank's part of a linear layer or of experts, tiled like a whole one."""
    return tiled_experts(part) if are_experts(part) else tiled(part, dtype, plain=plain)
