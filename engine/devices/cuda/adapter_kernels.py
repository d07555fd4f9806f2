"""Kernels that add adapters to rows of a product. Each row names its adapter by an address."""

from __future__ import annotations

import triton
import triton.language as tl


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
