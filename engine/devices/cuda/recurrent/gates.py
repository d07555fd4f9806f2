"""The last step of recurrent mixers: output gates, next to the writes of the rows to their windows."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.kernels import rounded, weighted
from engine.devices.cuda.recurrent.keep import keep_block
from engine.model.program import NormKind

_EXACT = tl.constexpr(int(NormKind.EXACT))


@triton.jit(do_not_specialize=["num_kept"])
def gate_heads(
    key,
    decay,
    keys,
    decays,
    sequences,
    keys_step,
    decays_step,
    num_kept,
    x,
    weight,
    gates,
    out,
    epsilon,
    gates_row,
    KEPT: tl.constexpr,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    STEP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (num_kept + rows * HEADS). Round and norm what each head read, and multiply it by its gates'
    SiLU, or in an EXACT norm their sigmoid. In a row of gates, EACH heads are together, and begin every STEP
    values.
    """
    number = tl.program_id(0)
    if number < num_kept:
        keep_block(number, key, decay, keys, decays, sequences, keys_step, decays_step, KEPT)
        return
    number, i = (number - num_kept).to(tl.int64), tl.arange(0, PADDED)
    inside, head = i < SIZE, number % HEADS
    values = rounded(tl.load(x + number * SIZE + i, mask=inside, other=0.0), out)
    values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    values = weighted(values, weights, out, KIND)
    place = number // HEADS * gates_row + head // EACH * STEP + head % EACH * SIZE + i
    opening = tl.load(gates + place, mask=inside, other=0.0).to(tl.float32)
    open = 1.0 / (1.0 + tl.exp(-opening))
    if KIND != _EXACT:
        values, open = rounded(values, out), open * opening
    tl.store(out + number * SIZE + i, (values * open).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_kept"])
def gate_states(
    key,
    decay,
    keys,
    decays,
    sequences,
    keys_step,
    decays_step,
    num_kept,
    read,
    value,
    skips,
    gates,
    weight,
    out,
    epsilon,
    gates_row,
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    NORMS_FIRST: tl.constexpr,
):
    """Grid: (num_kept + rows * groups). Add what skips a state space to what its heads of HEAD values read,
    multiply the sum by its gates' SiLU, and norm groups, if there is a `weight` [WEIGHTS], after that or
    before.
    """
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    number = tl.program_id(0)
    if number < num_kept:
        keep_block(number, key, decay, keys, decays, sequences, keys_step, decays_step, KEPT)
        return
    number -= num_kept
    row, i = (number // GROUPS).to(tl.int64), number % GROUPS * GROUP + tl.arange(0, PADDED)
    inside = (tl.arange(0, PADDED) < GROUP) & (i < SIZE)
    values = tl.load(read + row * SIZE + i, mask=inside, other=0.0)
    skipping = tl.load(value + row * SIZE + i, mask=inside, other=0.0)
    values += tl.load(skips + i // HEAD, mask=inside, other=0.0).to(tl.float32) * skipping
    opening = tl.load(gates + row * gates_row + i, mask=inside, other=0.0).to(tl.float32)
    opening = opening / (1.0 + tl.exp(-opening))
    if weight is None:
        values *= rounded(opening, out)
    else:
        if not NORMS_FIRST:
            values *= opening
        values *= tl.rsqrt(tl.sum(values * values, 0) / GROUP + epsilon)
        values *= tl.load(weight + i % WEIGHTS, mask=inside, other=0.0).to(tl.float32)
        if NORMS_FIRST:
            values *= opening
    tl.store(out + row * SIZE + i, values.to(out.dtype.element_ty), mask=inside)
