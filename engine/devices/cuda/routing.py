"""The choice of each row's experts on a CUDA device, and the lists of each expert's rows."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from engine.devices.cuda.buckets import MOST_ROWS
from engine.devices.cuda.expert_kernels import TILE_FIELDS, assign, route
from engine.devices.cuda.products import ROWS, Routes, TiledLinear
from engine.model.program import Experts
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
    return torch.zeros(count, dtype=torch.int32, device=device)
