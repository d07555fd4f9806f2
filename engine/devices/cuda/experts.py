"""Experts on a CUDA device: the choice of each row's experts, the lists of each expert's rows, and products
of all experts in one launch each, with weights as they are stored.

A row's result has the same bits in every batch: a tile has rows of one expert, and sums as a tile of any
size does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from triton import next_power_of_2

from engine.devices.cuda.buckets import MOST_ROWS
from engine.devices.cuda.expert_kernels import TILE_FIELDS, assign, route
from engine.devices.cuda.joined_products import Weight, joined
from engine.devices.cuda.kernels import combine
from engine.devices.cuda.products import ROWS, TENSORS, Routes, Tiled, TiledLinear, fits, tiled
from engine.linear.experts import ExpertsModule, Routed, are_experts, fused_parts, join_experts
from engine.linear.quantized import QuantizedLinear
from engine.model.describe import gate_of
from engine.model.program import Activation, Experts, Mlp
from engine.triton_support import ceil_div, power_of_two

_FEW_ROWS = 16
"""Rows of a tile if experts have few each, which are all the rows that a matrix unit takes at least."""
_FEW_EACH = 32
"""The most rows of an expert on average for which small tiles pay, though weights may be read twice."""
_BLOCK = 1024
_COLUMNS, _DEPTH, _SPAN = 32, 128, 1024
"""The router's outputs in a tile, and the inputs that a program sums, in steps of the smaller number."""
_CHOSEN_TOGETHER, _MOST_TOGETHER = 1024, 4
"""The most scores, and the most rows, of which a program chooses at a time."""
_COUNTERS = 4096
"""Counters that most steps need at most."""


class _Lists(NamedTuple):
    """Memory for the rows of each expert, and counters, which are zero between launches."""

    counters: Tensor
    places: Tensor
    tiles: Tensor


class Router(NamedTuple):
    """A layer's router. With `shared`, an expert after the others is every row's; its weight is 1, or the
    sigmoid of the last output of `weight`, if that has more outputs than there are experts.
    """

    experts: Experts
    weight: Tensor
    shared: bool

    @classmethod
    def of(cls, experts: Experts, *, shared: bool) -> Router:
        weight = experts.router.detach()
        if shared and experts.shared_gate is not None:
            (gate,) = experts.shared_gate.linears
            own = gate.values() if isinstance(gate, TiledLinear) else gate.weight.detach()
            weight = torch.cat([weight, own.to(weight.dtype)])
        return cls(experts, weight.contiguous(), shared)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' experts, int64 [rows, n], and their weights."""
        chosen = torch.empty((len(x), self._entries), dtype=torch.int64, device=x.device)
        return chosen, self._launch(x, chosen, None, _FEW_ROWS)

    def routes(self, x: Tensor) -> tuple[Routes, Tensor]:
        """Return the tiles of the rows of each expert, and the rows' weights [rows, n]."""
        rows, lists = _lists(len(x), self._entries, len(self.experts.router) + self.shared, x.device)
        weights = self._launch(x, None, lists, rows)
        return Routes(lists.tiles, lists.places, rows, weights.numel()), weights

    @property
    def _entries(self) -> int:
        return self.experts.chosen + self.shared

    def _launch(self, x: Tensor, chosen: Tensor | None, lists: _Lists | None, rows: int) -> Tensor:
        how, x = self.experts, x.contiguous()
        (count, inputs), (outputs, _), num_experts = x.shape, self.weight.shape, len(how.router)
        weights = x.new_empty((count, self._entries), dtype=x.dtype if how.rounds else torch.float32)
        tiles, spans = ceil_div(count, rows), ceil_div(inputs, _SPAN)
        padded = power_of_two(num_experts + self.shared)
        groups, each = next_power_of_2(how.groups), next_power_of_2(num_experts // how.groups)
        depth = _DEPTH if self.weight.itemsize <= 2 else _DEPTH // 4
        route[(tiles, ceil_div(outputs, _COLUMNS), spans)](
            x,
            self.weight,
            None if how.is_exact else how.router_bias,
            how.preferences,
            how.factors,
            x.new_empty((spans, count, outputs), dtype=torch.float32),
            _counters(padded, tiles, x.device) if lists is None else lists.counters,
            chosen,
            weights,
            None if lists is None else lists.places,
            None if lists is None else lists.tiles,
            count,
            0 if lists is None else len(lists.tiles),
            how.least_sum,
            how.scaling,
            INPUTS=inputs,
            EXPERTS=num_experts,
            PADDED=padded,
            CHOSEN=how.chosen,
            WIDTH=next_power_of_2(self._entries),
            GROUPS=how.groups,
            GROUPS_PADDED=groups,
            EACH_PADDED=each,
            OPEN=how.open_groups,
            SHARED=int(self.shared),
            OUTPUTS=outputs,
            SCORE=how.score.value,
            IS_EXACT=how.is_exact,
            ROUNDS=how.rounds,
            NORMALIZES=how.normalizes,
            ROWS=rows,
            TOGETHER=max(1, min(_MOST_TOGETHER, _CHOSEN_TOGETHER // (groups * each))),
            COLUMNS=_COLUMNS,
            DEPTH=depth,
            SPAN=_SPAN,
            num_warps=4,
            num_stages=4 if rows < ROWS else 3,
        )
        return weights


def routes_of(chosen: Tensor, num_experts: int) -> Routes:
    """Return the tiles of the rows [rows, n] that chose these experts, each once; an expert outside has no
    tile.
    """
    rows, lists = _lists(len(chosen), chosen.shape[1], num_experts, chosen.device)
    assign[(ceil_div(chosen.numel(), _BLOCK),)](
        chosen.contiguous(),
        *lists,
        chosen.numel(),
        len(chosen),
        len(lists.tiles),
        EXPERTS=num_experts,
        PADDED=power_of_two(num_experts),
        ROWS=rows,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Routes(lists.tiles, lists.places, rows, chosen.numel())


def _lists(rows: int, each: int, num_experts: int, device: torch.device) -> tuple[int, _Lists]:
    """Return the rows of a tile, and memory for the lists of `rows` that choose `each` of the experts."""
    count = rows * each
    is_few = rows <= MOST_ROWS and count <= _FEW_EACH * num_experts
    size = _FEW_ROWS if is_few else ROWS
    most = min(count, count // size + num_experts)
    counters = _counters(power_of_two(num_experts), ceil_div(rows, size), device)
    places = torch.empty(num_experts * rows, dtype=torch.int32, device=device)
    return size, _Lists(
        counters, places, torch.empty((most, TILE_FIELDS.value), dtype=torch.int32, device=device)
    )


def _counters(padded: int, tiles: int, device: torch.device) -> Tensor:
    """Return a counter for each expert, for tiles of rows that are done, and for each tile."""
    return _zeros(max(_COUNTERS, power_of_two(padded + 1 + tiles)), device)


@cache
def _zeros(count: int, device: torch.device) -> Tensor:
    """Return zeros, which kernels leave."""
    return torch.zeros(count, dtype=torch.int32, device=device)


_BY_KERNEL = Activation.SILU, Activation.GELU_TANH, Activation.CLAMPED_SWIGLU


def add_up(rows: Tensor, weights: Tensor) -> Tensor:
    """Add up the results of each row's experts, times their `weights` [rows, n]."""
    size = rows.shape[1]
    out = rows.new_empty((len(weights), size))
    combine[(len(out), ceil_div(size, _BLOCK))](
        rows,
        weights.contiguous(),
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
            parts = [TiledLinear.quantized(each.quantized, each.bias) for each in layers]
        else:
            plain = [each.plain(dtype) if isinstance(each, QuantizedLinear) else each for each in layers]
            parts = [TiledLinear.plain(each.weight.detach(), each.bias) for each in plain]
        there = (name for name in TENSORS if getattr(parts[0], name) is not None)
        stacked = {name: torch.stack([getattr(part, name) for part in parts]) for name in there}
        return cls(parts[0].format, parts[0].depth, **stacked)

    def is_like(self, weight: Weight) -> bool:
        """Return whether the layers and another, joined of several, have tensors alike."""
        format = weight.format if isinstance(weight, TiledLinear) else None
        if format is not self.format:
            return False
        for name in TENSORS:
            own, other = getattr(self, name), getattr(weight, name, None)
            if own is None or other is None:
                if own is not other:
                    return False
            elif (own.dtype, own.shape[1:]) != (other.dtype, other.shape):
                return False
        return True

    def and_one(self, linears: Sequence[Any], weight: Weight) -> RoutedTiles:
        """Return the layers and one more, `weight`, joined of `linears`, which become views of it."""
        there = [name for name in TENSORS if getattr(self, name) is not None]
        whole = {name: torch.cat([getattr(self, name), getattr(weight, name)[None]]) for name in there}
        end = 0
        for each in linears:
            begin, end = end, end + each.out_features
            for name, tensor in whole.items():
                part = tensor[-1] if name == "order" else tensor[-1, begin:end]
                is_parameter = isinstance(getattr(each, name), nn.Parameter)
                setattr(each, name, nn.Parameter(part, requires_grad=False) if is_parameter else part)
        return type(self)(self.format, self.depth, **whole)

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
        out = x.new_empty((routes.results, self.out_features))
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

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if not len(hidden):
            return hidden
        return self.add_up(self.results(hidden, routes_of(chosen, self.num_experts)), weights)

    def results(self, hidden: Tensor, routes: Routes) -> Tensor:
        """Return the results of each row's experts [rows * n, features]."""
        rows, gate = self.first(hidden, routes), self._gate
        rows = self.second(rows if gate is not None else self._activate(rows), routes, gate)
        if getattr(self.rest, "has_post_expert_norm", False):
            rows = self.rest.post_expert_norm(rows)
        return rows

    def add_up(self, rows: Tensor, weights: Tensor) -> Tensor:
        return add_up(rows, weights)

    def and_shared(self, mlp: Mlp) -> TiledExperts | None:
        """Return these experts and an MLP as one more; None if it is not like them."""
        products, has_norm = (mlp.gate_up, mlp.down), getattr(self.rest, "has_post_expert_norm", False)
        if has_norm or not mlp.is_gated or self._gate is not mlp.activation:
            return None
        if not all(product.is_plain for product in products):
            return None
        layers = [
            (own, product.linears, joined(product.linears))
            for own, product in zip((self.first, self.second), products, strict=True)
        ]
        if not all(own.is_like(weight) for own, _, weight in layers):
            return None
        first, second = (own.and_one(linears, weight) for own, linears, weight in layers)
        return type(self)(first, second, self.rest)

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
