"""Which outputs of a model's products each rank computes: those of its attention heads, and even parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.linear.packed import PackedLinear, linear_of, plain_weight, rows_of
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
