"""Recurrent mixers between their products, in three launches: the inputs of all heads, attention, and output
gates, which also keep the rows for later ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.devices.cuda.kernels import rounded, weighted
from engine.devices.cuda.latents import multiply
from engine.devices.cuda.recurrent.keep import keep_block
from engine.devices.cuda.recurrent.operators import Kept, TritonOperators
from engine.devices.cuda.recurrent.prepare import HeadPlaces, MixerConstants, prepare
from engine.kv.state_slots import RecurrentLayer
from engine.model.program import MixerKind, NormKind, Recurrent
from engine.triton_support import ceil_div, power_of_two

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


_ROWS = 8
_GATED_TOGETHER = 1024


class _Read(NamedTuple):
    """The outputs of a mixer's heads and their values, both float32 [rows, heads, value_dim]."""

    read: Tensor
    value: Tensor
    kept: Kept


def apply_delta_rule(
    operators: TritonOperators, mixer: Recurrent, made: Tensor, gates: Tensor, low_rank: Tensor | None = None
) -> Tensor:
    """Return the input of a gated delta net's output product, from what its products made. `low_rank` has the
    weights [2, outputs, inputs] of its low-rank products, if these are plain.
    """
    assert mixer.norm is not None
    shape = operators.state_slots.layout.layers[mixer.number]
    each = shape.num_heads // shape.num_key_heads
    times, opening = gates[:, shape.num_heads :], made[:, shape.channels :]
    heads_step = each * shape.value_dim
    if mixer.is_interleaved:
        times, opening = gates[:, each:], made[:, 2 * shape.key_dim + heads_step :]
        heads_step = 2 * (shape.key_dim + heads_step)
    if low_rank is not None:
        both = made.new_empty((len(made), *low_rank.shape[:2]))
        multiply(low_rank, times.unflatten(-1, (2, -1)), both)
        times, opening = both.unbind(1)
    elif mixer.decays is not None:
        assert mixer.opening is not None
        low, other = times.split([mixer.decays.in_features, mixer.opening.in_features], dim=-1)
        times, opening = mixer.decays(low), mixer.opening(other)
    read, _, kept = _read(operators, mixer, made, gates, times)
    out = made.new_empty((len(made), shape.num_heads * shape.value_dim))
    kind = mixer.norm.kind if mixer.decays is None else NormKind.EXACT
    gate_heads[(kept.programs + len(made) * shape.num_heads,)](
        *kept.arguments,
        kept.programs,
        read,
        mixer.norm.weight,
        opening,
        out,
        mixer.norm.epsilon,
        opening.stride(0),
        KEPT=kept.constants,
        KIND=kind.value,
        HEADS=shape.num_heads,
        EACH=each,
        STEP=heads_step,
        SIZE=shape.value_dim,
        PADDED=power_of_two(shape.value_dim),
        num_warps=1 if shape.value_dim <= 256 else 4,
    )
    return out


def scan_states(operators: TritonOperators, mixer: Recurrent, made: Tensor) -> Tensor:
    """Return the input of a state space's output product, from what its first product made."""
    shape, norm = operators.state_slots.layout.layers[mixer.number], mixer.norm
    width = shape.num_heads * shape.value_dim
    times = made[:, width + shape.channels :]
    read, value, kept = _read(operators, mixer, made, times, times)
    out, group = made.new_empty((len(made), width)), _GATED_TOGETHER if norm is None else mixer.group
    gate_states[(kept.programs + len(made) * ceil_div(width, group),)](
        *kept.arguments,
        kept.programs,
        read,
        value,
        mixer.skips,
        made,
        None if norm is None else norm.weight,
        out,
        0.0 if norm is None else norm.epsilon,
        made.stride(0),
        KEPT=kept.constants,
        SIZE=width,
        HEAD=shape.value_dim,
        GROUP=group,
        PADDED=power_of_two(group),
        WEIGHTS=1 if norm is None else norm.weight.numel(),
        NORMS_FIRST=mixer.norms_first,
        num_warps=4,
    )
    return out


def _read(
    operators: TritonOperators, mixer: Recurrent, made: Tensor, strengths: Tensor, times: Tensor
) -> _Read:
    """Run a mixer from its products' outputs, with the heads' gates before they are activated."""
    assert mixer.rates is not None and mixer.shifts is not None
    tables, layout = operators.tables, operators.state_slots.layout
    of = operators.state_slots.layers[mixer.number]
    shape = layout.layers[mixer.number]
    is_delta = mixer.kind is not MixerKind.STATE_SPACE
    block = power_of_two(max(shape.key_dim, shape.value_dim))
    keys, values = (shape.num_key_heads, shape.key_dim), (shape.num_heads, shape.value_dim)
    sizes = keys, keys, values, (shape.num_heads, shape.decay_dim), (shape.num_heads,)
    query, key, value, decay, strength = (
        torch.empty((len(made), *size), dtype=torch.float32, device=made.device) for size in sizes
    )
    gate_blocks = ceil_div(shape.num_heads * shape.decay_dim, block)
    prepare[(len(tables.sequences), 2 * shape.num_key_heads + shape.num_heads + gate_blocks)](
        made,
        strengths,
        times,
        mixer.taps,
        mixer.bias,
        mixer.rates,
        mixer.shifts,
        query,
        key,
        value,
        decay,
        strength,
        of.tail,
        of.inputs,
        tables.sequences,
        tables.before,
        tables.tails,
        mixer.shortest,
        mixer.longest,
        of.tail.stride(0),
        of.inputs.stride(0),
        made.stride(0),
        strengths.stride(0),
        times.stride(0),
        *mixer.taps.stride(),
        PLACES=_places(shape, is_delta=is_delta, is_interleaved=mixer.is_interleaved),
        OF=MixerConstants(
            shape.num_heads,
            shape.num_key_heads,
            shape.key_dim,
            shape.value_dim,
            shape.decay_dim,
            is_delta,
            shape.channels,
            shape.taps,
            triton.next_power_of_2(shape.taps),
            operators.reach,
            layout.window,
            _ROWS,
            block,
        ),
        num_warps=4,
    )
    read = operators.attend(mixer.number, (query, key, value, decay, strength), is_delta=is_delta)
    return _Read(read, value, operators.kept(mixer.number, key, decay))


def _places(shape: RecurrentLayer, *, is_delta: bool, is_interleaved: bool) -> HeadPlaces:
    """Return the places of a layer's heads in its channels and in its products' outputs."""
    each = shape.num_heads // shape.num_key_heads
    keys, values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
    own = each * shape.value_dim
    if is_interleaved:  # each key head's query, key, values and output gates are together
        step = 2 * (shape.key_dim + own)
        return HeadPlaces(0, keys, 2 * keys, 0, shape.key_dim, 2 * shape.key_dim, step, step, 2 * each)
    if is_delta:
        return HeadPlaces(0, keys, 2 * keys, 0, keys, 2 * keys, shape.key_dim, own, each)
    query, key = values + keys, values  # the products' outputs begin with the output gates
    return HeadPlaces(query, key, 0, values + query, values + key, values, shape.key_dim, own, each)
