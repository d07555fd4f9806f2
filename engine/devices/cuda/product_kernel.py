"""Products of rows with a weight matrix, plain or quantized, in tiles of a fixed size."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.write import decode, encode
from engine.devices.cuda.expert_kernels import TILE_FIELDS
from engine.devices.cuda.kernels import activated, clamped_swiglu
from engine.model.program import Activation

PLAIN, INT8, FP8, INT4, MXFP4 = map(tl.constexpr, range(5))
"""The kinds of weights. Decoded FP8 values are divided by 256; decoded MXFP4 values are doubled. Scales are
float32, but MXFP4's are the exponents of powers of two, uint8, plus 127.
"""

_CLAMPED_SWIGLU = tl.constexpr(int(Activation.CLAMPED_SWIGLU))


@triton.jit
def _values(words, zero, like, KIND: tl.constexpr):
    """Decode the low four bits of `words`, or all eight, exactly, to the dtype of `like`."""
    if KIND == PLAIN:
        values = words
    elif KIND == INT8:
        values = decode(words, False)
    elif KIND == FP8:
        values = decode(words, True)
    elif KIND == INT4:
        values = (words & 15).to(tl.float32)
        values = values - 8.0 if zero is None else values - zero
    else:
        exponent, odd = (words >> 1) & 3, (words & 1).to(tl.int32)
        doubled = tl.where(exponent == 0, odd, (2 + odd) << (tl.maximum(exponent, 1) - 1).to(tl.int32))
        values = tl.where((words & 8) != 0, -doubled, doubled).to(tl.float32)
    return values.to(like.dtype.element_ty)


@triton.jit
def _inputs(x, others, order, first, is_row, COUNT: tl.constexpr, INPUTS: tl.constexpr, GATE: tl.constexpr):
    """Load COUNT columns of the tile's rows from `first` on, or those whose numbers are in `order`. With a
    GATE's activation they are activated and multiplied by the columns of `others`; gates of CLAMPED_SWIGLU
    alternate with their values.
    """
    if GATE == _CLAMPED_SWIGLU:
        k = 2 * first + tl.arange(0, 2 * COUNT)
        pairs = tl.load(x + k[None, :], mask=is_row & (k < 2 * INPUTS)[None, :], other=0.0).to(tl.float32)
        gates, factors = tl.split(tl.reshape(pairs, (pairs.shape[0], COUNT, 2)))
        values = clamped_swiglu(gates, factors, x).to(x.dtype.element_ty)
    else:
        k = first + tl.arange(0, COUNT)
        inside = (k < INPUTS)[None, :]  # false only where a plain matrix ends within a tile
        columns = k if order is None else tl.load(order + k)
        values = tl.load(x + columns[None, :], mask=is_row & inside, other=0.0)
        if GATE is not None:
            factors = tl.load(others + columns[None, :], mask=is_row & inside, other=0.0)
            active = activated(values.to(tl.float32), GATE).to(x.dtype.element_ty)
            values = (active.to(tl.float32) * factors.to(tl.float32)).to(x.dtype.element_ty)
    return values


@triton.jit
def _scales(scales, place, is_output, KIND: tl.constexpr):
    values = tl.load(scales + place, mask=is_output, other=0)
    if KIND == MXFP4:
        exponents = values.to(tl.int32)
        values = tl.where(exponents > 0, exponents << 23, 1 << 22).to(tl.float32, bitcast=True)
    return values


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x,
    others,
    weight,
    scales,
    zeros,
    order,
    bias,
    tiles,
    places,
    parts,
    arrivals,
    out,
    num_rows,
    x_stride,
    others_stride,
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPAN: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (ROWS rows, COLUMNS outputs). Compute a tile of products. Programs of the same outputs run
    together and share weights in the cache. Every DEPTH inputs are summed, then scaled. A byte of four-bit
    codes has input k in its low half and input k + DEPTH / 2 in its high half.

    The sums of SPAN inputs each are added in order. With `parts`, float32 [spans, rows, OUTPUTS], spans are
    the grid's third dimension, and the last program of a tile adds their sums. It leaves the zeros that it
    found in `arrivals`, int32 [tiles].

    With `tiles` and `places` of `expert_kernels`, tensors of weights begin with a dimension of
    experts, and a tile has the rows of one expert; each SHARED rows of `out` have one row of `x`.
    """
    CODES: tl.constexpr = 2 if (KIND == INT4) | (KIND == MXFP4) else 1
    HALF: tl.constexpr = DEPTH // CODES
    GROUPS: tl.constexpr = INPUTS // GROUP
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = (m < num_rows)[:, None]
    if tiles is not None:
        tiles += tl.program_id(0) * TILE_FIELDS
        expert = tl.load(tiles).to(tl.int64)
        if expert < 0:
            return
        place = tl.load(tiles + 1) + tl.arange(0, ROWS)
        is_place = place < tl.load(tiles + 2)
        m, is_row = tl.load(places + place, mask=is_place, other=0), is_place[:, None]
        weight += expert * (OUTPUTS * (INPUTS // CODES))
        if scales is not None:
            scales += expert * (OUTPUTS * GROUPS)
        if zeros is not None:
            zeros += expert * (OUTPUTS * GROUPS)
        if order is not None:
            order += expert * INPUTS
        if bias is not None:
            bias += expert * OUTPUTS
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, HALF)
    is_output = n < OUTPUTS
    x += (m // SHARED).to(tl.int64)[:, None] * x_stride
    if others is not None:
        others += (m // SHARED).to(tl.int64)[:, None] * others_stride
    weight += n.to(tl.int64)[:, None] * (INPUTS // CODES) + i[None, :]
    begin, end = 0, INPUTS
    if parts is not None:
        begin = tl.program_id(2) * SPAN
        end = begin + 1
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, SPAN):
        own = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(first, tl.minimum(first + SPAN, INPUTS), DEPTH):
            inside = (start + i < INPUTS)[None, :]
            words = tl.load(weight + start // CODES, mask=is_output[:, None] & inside, other=0)
            zero = None
            if zeros is not None:
                zero = tl.load(zeros + n * GROUPS + start // GROUP, mask=is_output, other=0.0)[:, None]
            inputs = _inputs(x, others, order, start, is_row, HALF, INPUTS, GATE)
            part = tl.dot(inputs, _values(words, zero, x, KIND).T, input_precision=PRECISION)
            if CODES == 2:
                inputs = _inputs(x, others, order, start + HALF, is_row, HALF, INPUTS, GATE)
                part = tl.dot(inputs, _values(words >> 4, zero, x, KIND).T, part, input_precision=PRECISION)
            if GROUPS > 1:
                part *= _scales(scales, n * GROUPS + start // GROUP, is_output, KIND)[None, :]
            own += part
        total += own
    if parts is not None:
        SPANS: tl.constexpr = (INPUTS + SPAN - 1) // SPAN
        size = num_rows * OUTPUTS
        parts += m[:, None] * OUTPUTS + n[None, :]
        is_inside = is_row & is_output[None, :]
        tl.store(parts + tl.program_id(2) * size, total, mask=is_inside)
        tl.debug_barrier()  # after the stores of all threads; the atomic addition releases and acquires them
        if tl.atomic_add(arrivals + tl.program_id(1), 1) < SPANS - 1:
            return
        tl.store(arrivals + tl.program_id(1), 0)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for span in range(SPANS):
            total += tl.load(parts + span * size, mask=is_inside, other=0.0)
    if GROUPS == 1 and scales is not None:
        total *= _scales(scales, n, is_output, KIND)[None, :]
    if KIND == MXFP4:
        total *= 0.5
    if bias is not None:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    out += m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=is_row & is_output[None, :])


@triton.jit(do_not_specialize=["x_row", "scales_group"])
def round_rows(x, codes, scales, x_row, scales_group, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Grid: (rows, groups of SIZE values). Write a group's FP8 values and its scale."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED)
    inside = d < SIZE
    values = tl.load(x + row * x_row + group * SIZE + d, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = encode(values, True)
    tl.store(codes + (row * tl.num_programs(1) + group) * SIZE + d, rounded, mask=inside)
    tl.store(scales + group * scales_group + row, scale)
