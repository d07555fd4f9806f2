"""Adapters on a CUDA device: two launches add the part of each row's adapter to a product. A row names its
adapter by an address.

A row's result has the same bits in every batch: inputs are summed in splits of one size, and rows of a tile
with the same adapter are multiplied together, as in the tiles of `products`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.lora.table import Adapters
from engine.triton_support import ceil_div, power_of_two


@triton.jit
def _rows_of(adapters, row, num_rows, ROWS: tl.constexpr):
    """Return the rows of the tile that contains `row`, which of them have its adapter, the adapter, and
    whether `row` is the first of these: only the first row's program computes, for all of them.
    """
    m = row // ROWS * ROWS + tl.arange(0, ROWS)
    adapter = tl.load(adapters + row)
    is_own = (m < num_rows) & (tl.load(adapters + m, mask=m < num_rows, other=0) == adapter)
    is_first = tl.sum((is_own & (m < row)).to(tl.int32), 0) == 0
    return m.to(tl.int64), is_own, adapter, (adapter != 0) & is_first


@triton.jit
def _side(adapter, layer, SIDE: tl.constexpr, DTYPE: tl.constexpr):
    """Return a layer's `down` or `up` from an adapter's table [layers, 3], and its rank (0: no adapter)."""
    fields = adapter.to(tl.pointer_type(tl.int64)) + layer * 3
    matrix = tl.multiple_of(tl.load(fields + SIDE).to(tl.pointer_type(DTYPE)), 16)
    return matrix, tl.multiple_of(tl.load(fields + 2).to(tl.int32), 8)


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x,
    adapters,
    parts,
    out,
    num_rows,
    x_stride,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTH: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (rows, parts, splits * blocks). Multiply rows by RANKS ranks and SPLIT inputs of `down` [rank,
    INPUTS]; write the products to float32 `out` [rows, PARTS, SPLITS, BLOCKS * RANKS].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    split, block = tl.program_id(2) // BLOCKS, tl.program_id(2) % BLOCKS
    m, is_own, adapter, leads = _rows_of(adapters, row, num_rows, ROWS)
    if not leads:
        return
    down, rank = _side(adapter, tl.load(parts + part * 3), 0, DTYPE)
    if block * RANKS >= rank:
        return
    r = block * RANKS + tl.arange(0, RANKS)
    x += m[:, None] * x_stride
    down += r[:, None] * INPUTS
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, SPLIT, DEPTH):
        k = split * SPLIT + start + tl.arange(0, DEPTH)
        inside = (k < INPUTS)[None, :]
        inputs = tl.load(x + k[None, :], mask=is_own[:, None] & inside, other=0.0)
        weights = tl.load(down + k[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
        total = tl.dot(inputs, weights.T, total, input_precision=PRECISION)
    out += ((m * PARTS + part) * SPLITS + split)[:, None] * (BLOCKS * RANKS) + r[None, :]
    tl.store(out, total, mask=is_own[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    shrunk,
    adapters,
    parts,
    out,
    num_rows,
    out_stride,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (rows, parts, blocks of COLUMNS outputs). Add the products of `shrunk` with `up` [outputs, rank]
    to rows of `out`. Parts begin and end at multiples of STEP.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    first, outputs = tl.load(parts + part * 3 + 1), tl.load(parts + part * 3 + 2)
    first, outputs = tl.multiple_of(first, STEP), tl.multiple_of(outputs, STEP)
    n = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    m, is_own, adapter, leads = _rows_of(adapters, row, num_rows, ROWS)
    if not leads or tl.program_id(2) * COLUMNS >= outputs:
        return
    up, rank = _side(adapter, tl.load(parts + part * 3), 1, DTYPE)
    if rank == 0:
        return
    shrunk += (m * PARTS + part)[:, None] * (SPLITS * BLOCKS * RANKS)
    added = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        there = is_own[:, None] & (r < rank)[None, :]
        inner = tl.zeros((ROWS, RANKS), tl.float32)
        for split in range(SPLITS):
            inner += tl.load(shrunk + split * BLOCKS * RANKS + r[None, :], mask=there, other=0.0)
        is_weight = (n < outputs)[:, None] & (r < rank)[None, :]
        weights = tl.load(up + n.to(tl.int64)[:, None] * rank + r[None, :], mask=is_weight, other=0.0)
        added = tl.dot(inner.to(DTYPE), weights.T, added, input_precision=PRECISION)
    out += m[:, None] * out_stride + (first + n)[None, :]
    is_output = is_own[:, None] & (n < outputs)[None, :]
    values = tl.load(out, mask=is_output, other=0.0).to(tl.float32) + added
    tl.store(out, values.to(out.dtype.element_ty), mask=is_output)


_ROWS, _COLUMNS, _MOST_RANKS = 16, 128, 64
"""The rows, columns and ranks that one program computes."""
_SPLIT, _DEPTH_BYTES = 1024, 256
"""Inputs that a program sums, and the bytes of them that it loads at a time."""
_STEP = 16
"""The most useful alignment of parts: a larger one makes loads no wider."""


@dataclass(frozen=True)
class AdaptedProduct:
    """A product of one input whose adjacent parts are linear layers. `parts`, int32 [parts, 3], has each
    layer's number in adapters' tables, its first column and its number of outputs, at most `widest`. Parts
    begin and end at multiples of `step`. Adapters have the dtype `dtype` and ranks up to `max_rank`.
    """

    parts: Tensor
    inputs: int
    widest: int
    step: int
    max_rank: int
    dtype: torch.dtype

    @classmethod
    def of(cls, paths: Sequence[str], adapters: Adapters) -> AdaptedProduct:
        numbers, shapes = [*adapters.linears], [adapters.own_shape(path) for path in paths]
        parts, first = [], 0
        for path, shape in zip(paths, shapes, strict=True):
            parts.append([numbers.index(path), first, shape.outputs])
            first += shape.outputs
        on_device = torch.tensor(parts, dtype=torch.int32, device=adapters.device)
        outputs = [shape.outputs for shape in shapes]
        step = gcd(_STEP, *outputs)
        return cls(on_device, shapes[0].inputs, max(outputs), step, adapters.max_rank, adapters.dtype)

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add each row's adapter's part, for the inputs `x` [..., inputs], to `out` [..., outputs].
        `adapters`, int64 [rows], has the adapters' addresses (`Adapters.addresses`).
        """
        rows, whole = x.reshape(-1, self.inputs).to(self.dtype), out.view(-1, out.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        self._expand(self._shrink(rows, adapters), whole, adapters)

    def _shrink(self, rows: Tensor, adapters: Tensor) -> Tensor:
        constants = self._constants
        num_parts, splits, blocks = (constants[name] for name in ("PARTS", "SPLITS", "BLOCKS"))
        sizes = len(rows), num_parts, splits, blocks * constants["RANKS"]
        shrunk = rows.new_empty(sizes, dtype=torch.float32)
        shrink[(len(rows), num_parts, splits * blocks)](
            rows,
            adapters,
            self.parts,
            shrunk,
            len(rows),
            rows.stride(0),
            INPUTS=self.inputs,
            SPLIT=_SPLIT,
            DEPTH=_DEPTH_BYTES // self.dtype.itemsize,
            **constants,
        )
        return shrunk

    def _expand(self, shrunk: Tensor, out: Tensor, adapters: Tensor) -> None:
        expand[(len(out), len(self.parts), ceil_div(self.widest, _COLUMNS))](
            shrunk,
            adapters,
            self.parts,
            out,
            len(out),
            out.stride(0),
            COLUMNS=_COLUMNS,
            STEP=self.step,
            **self._constants,
        )

    @property
    def _constants(self) -> dict[str, Any]:
        ranks = min(power_of_two(self.max_rank), _MOST_RANKS)
        return {
            "PARTS": len(self.parts),
            "SPLITS": ceil_div(self.inputs, _SPLIT),
            "ROWS": _ROWS,
            "RANKS": ranks,
            "BLOCKS": ceil_div(self.max_rank, ranks),
            "DTYPE": getattr(tl, str(self.dtype).removeprefix("torch.")),
            "PRECISION": "ieee",
            "num_warps": 4,
        }


def adapted_modules(adapters: Adapters) -> Callable[[Tensor], ModuleAdapters]:
    """Return a function that makes a step's additions to modules from the addresses of rows' adapters."""
    products = {path: AdaptedProduct.of([path], adapters) for path in adapters.linears}
    return partial(ModuleAdapters, products)


class ModuleAdapters(NamedTuple):
    """The additions to a model's modules in a step (`engine.lora.layers`): `products` by linear layers'
    paths, and the rows' `adapters` as `AdaptedProduct.add` takes them.
    """

    products: Mapping[str, AdaptedProduct]
    adapters: Tensor

    def add(self, out: Tensor, x: Tensor, path: str) -> None:
        self.products[path].add(out, x, self.adapters)
