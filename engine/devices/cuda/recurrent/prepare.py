"""The convolution, in which a program walks through a sequence's rows for a block of channels; and the inputs
of linear attention in one launch: convolved queries, keys and values, and activated gates.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine.devices.cuda.kernels import rounded
from engine.devices.cuda.recurrent.keep import NO_SLOT, SEQUENCE_COLUMNS, clear_rows, keep_rows


@triton.jit
def _inputs_at(source, inside, block, CHANNELS: tl.constexpr, TAPS: tl.constexpr, WINDOW: tl.constexpr):
    """Load the inputs of n sources for the block's channels: [n, channels]."""
    inputs, stride, column, recent, tail, channel, is_channel = block
    c = channel[None, :]
    known = inside[:, None] & is_channel[None, :]
    is_row, is_recent = source >= 0, (source < 0) & (source >= -WINDOW)
    row = tl.where(is_row, source, 0).to(tl.int64)[:, None] * stride
    place = tl.where(is_recent, -1 - source, 0)[:, None] * CHANNELS
    tail_row = tl.where(source < -WINDOW, TAPS - 1 + WINDOW + source, 0)[:, None] * CHANNELS
    from_row = tl.load(inputs + row + column[None, :], mask=known & is_row[:, None], other=0.0)
    from_recent = tl.load(recent + place + c, mask=known & is_recent[:, None], other=0.0)
    from_tail = tl.load(tail + tail_row + c, mask=known & (source < -WINDOW)[:, None], other=0.0)
    return tl.where(is_row[:, None], from_row, tl.where(is_recent[:, None], from_recent, from_tail))


@triton.jit
def convolved(
    row,
    live,
    block,
    taps,
    before,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    REACH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return the sums of rows for a block of channels. A block has its inputs with their stride and columns,
    the sequence's earlier inputs, its channels, and which of them there are.
    """
    weight, bias, weight_channel, weight_tap = taps
    _, _, _, _, _, channel, is_channel = block
    total = tl.zeros([row.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = row
        if tap < TAPS - 1:
            source = tl.load(before + row * REACH + (REACH - TAPS + 1 + tap), mask=live, other=0)
        values = _inputs_at(source, live, block, CHANNELS, TAPS, WINDOW)
        factor = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=is_channel, other=0.0)
        total += values.to(tl.float32) * factor.to(tl.float32)[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def keep_inputs(
    entry,
    tails,
    block,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    REACH: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write the inputs that later steps read, once all programs' rows of these channels are summed."""
    inputs, stride, column, recent, tail, channel, is_channel = block
    tap = tl.arange(0, PADDED_TAPS)
    is_tail = tap < TAPS - 1
    source = tl.load(tails + (REACH - TAPS + 1) + tap, mask=is_tail, other=0)
    values = _inputs_at(source, is_tail, block, CHANNELS, TAPS, WINDOW)
    tl.debug_barrier()  # all that is overwritten from here on has been read
    new_tail = tail + tap[:, None] * CHANNELS + channel[None, :]
    tl.store(new_tail, values, mask=is_tail[:, None] & is_channel[None, :])
    keep_rows(inputs, stride, column, recent, entry, channel, is_channel, CHANNELS, WINDOW)


@triton.jit
def convolve(
    inputs,
    weight,
    bias,
    out,
    tail,
    recent,
    sequences,
    before,
    tails,
    tail_step,
    recent_step,
    weight_channel,
    weight_tap,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    REACH: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (sequences, blocks of channels). Convolve rows; `before` and `tails` are REACH wide."""
    sequence = tl.program_id(0)
    entry = sequences + sequence * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    first, end = tl.load(entry + 2), tl.load(entry + 4)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    if state_slot == NO_SLOT:
        clear_rows(out, entry, channel, CHANNELS)
        return
    tail += state_slot * tail_step
    recent += state_slot * recent_step
    block = (inputs, CHANNELS, channel, recent, tail, channel, is_channel)
    taps = (weight, bias, weight_channel, weight_tap)
    for begin in range(first, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        live = row < end
        total = convolved(row, live, block, taps, before, CHANNELS, TAPS, REACH, WINDOW)
        place = out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(place, total, mask=live[:, None] & is_channel[None, :])
    keep_inputs(entry, tails + sequence * REACH, block, CHANNELS, TAPS, PADDED_TAPS, REACH, WINDOW)


class HeadPlaces(NamedTuple):
    """The first channels of queries, keys and values; their first columns in the products' outputs; and the
    steps there from one key head to the next, of keys, of values, and of gates.
    """

    query_channel: int
    key_channel: int
    value_channel: int
    query_column: int
    key_column: int
    value_column: int
    key_step: int
    value_step: int
    gate_step: int


class MixerConstants(NamedTuple):
    """A layer's constants. With `is_delta`, queries and keys have length 1; else gates are a state space's
    time steps. `shortest` and `longest` limit these.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    decay_dim: int
    is_delta: bool
    channels: int
    taps: int
    padded_taps: int
    reach: int
    window: int
    rows: int
    block: int


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), precise also where exp(x) is small (Kahan)."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _gates(raw, outputs, parameters, first, end, block, PLACES: tl.constexpr, OF: tl.constexpr):
    """Write a block of a sequence's decays and strengths: those of new values, or a state space's steps."""
    strengths, strengths_row, times, times_row = raw
    decay, strength = outputs
    rates, shifts, shortest, longest = parameters
    WIDTH: tl.constexpr = OF.heads * OF.decay_dim
    EACH: tl.constexpr = OF.heads // OF.key_heads
    c = block * OF.block + tl.arange(0, OF.block)
    inside, head = c < WIDTH, c // OF.decay_dim
    column = c
    if OF.decay_dim == 1:
        column = c // EACH * PLACES.gate_step + c % EACH
    rate = tl.load(rates + head, mask=inside, other=0.0)
    shift = tl.load(shifts + c, mask=inside, other=0.0).to(tl.float32)
    of_head = c // EACH * PLACES.gate_step + c % EACH
    for begin in range(first, end, OF.rows):
        row = (begin + tl.arange(0, OF.rows)).to(tl.int64)
        live = (row < end)[:, None]
        time = tl.load(
            times + row[:, None] * times_row + column[None, :], mask=live & inside[None, :], other=0.0
        )
        time = time.to(tl.float32)
        place = row[:, None] * OF.heads + c[None, :]
        if OF.is_delta:
            time = _softplus(time + shift[None, :])
            is_head = live & (c < OF.heads)[None, :]
            opening = tl.load(
                strengths + row[:, None] * strengths_row + of_head[None, :], mask=is_head, other=0.0
            )
            opening = rounded(1.0 / (1.0 + tl.exp(-opening.to(tl.float32))), strengths)
            tl.store(strength + place, opening, mask=is_head)
        else:
            time = rounded(_softplus(rounded(time + rounded(shift, times)[None, :], times)), times)
            time = rounded(tl.minimum(tl.maximum(time, shortest), longest), times)
            tl.store(strength + place, time, mask=live & inside[None, :])
        tl.store(decay + row[:, None] * WIDTH + c[None, :], rate[None, :] * time, mask=live & inside[None, :])


@triton.jit(do_not_specialize=["shortest", "longest"])
def prepare(
    made,
    strengths,
    times,
    weight,
    bias,
    rates,
    shifts,
    query,
    key,
    value,
    decay,
    strength,
    tail,
    recent,
    sequences,
    before,
    tails,
    shortest,
    longest,
    tail_step,
    recent_step,
    made_row,
    strengths_row,
    times_row,
    weight_channel,
    weight_tap,
    PLACES: tl.constexpr,
    OF: tl.constexpr,
):
    """Grid: (sequences, heads of queries, keys and values, then blocks of gates). Convolve the products'
    outputs `made`, activate the results by SiLU, and compute decays and strengths.
    """
    sequence, part = tl.program_id(0), tl.program_id(1)
    entry = sequences + sequence * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    first, end = tl.load(entry + 2), tl.load(entry + 4)
    if state_slot == NO_SLOT:
        return
    if part >= 2 * OF.key_heads + OF.heads:
        raw = (strengths, strengths_row, times, times_row)
        parameters = (rates, shifts, shortest, longest)
        block = part - 2 * OF.key_heads - OF.heads
        _gates(raw, (decay, strength), parameters, first, end, block, PLACES, OF)
        return
    EACH: tl.constexpr = OF.heads // OF.key_heads
    is_value, is_key = part >= 2 * OF.key_heads, part >= OF.key_heads
    head = part - tl.where(is_value, 2 * OF.key_heads, tl.where(is_key, OF.key_heads, 0))
    size = tl.where(is_value, OF.value_dim, OF.key_dim)
    channel = tl.where(is_key, PLACES.key_channel, PLACES.query_channel)
    column = tl.where(is_key, PLACES.key_column, PLACES.query_column) + head * PLACES.key_step
    value_column = PLACES.value_column + head // EACH * PLACES.value_step + head % EACH * OF.value_dim
    i = tl.arange(0, OF.block)
    is_channel = i < size
    channel = tl.where(is_value, PLACES.value_channel, channel) + head * size + i
    column = tl.where(is_value, value_column, column) + i
    tail += state_slot * tail_step
    recent += state_slot * recent_step
    block = (made, made_row, column, recent, tail, channel, is_channel)
    taps = (weight, bias, weight_channel, weight_tap)
    width = tl.where(is_value, OF.heads * OF.value_dim, OF.key_heads * OF.key_dim)
    out = tl.where(is_value, value, tl.where(is_key, key, query))
    for begin in range(first, end, OF.rows):
        row = begin + tl.arange(0, OF.rows)
        live = row < end
        total = convolved(row, live, block, taps, before, OF.channels, OF.taps, OF.reach, OF.window)
        total = rounded(total / (1.0 + tl.exp(-total)), made)
        if OF.is_delta:
            length = tl.rsqrt(tl.sum(total * total, 1) + 1e-6)
            unit = total * length[:, None]
            unit = tl.where(is_key, unit, unit * OF.key_dim**-0.5)
            total = tl.where(is_value, total, unit)
        place = out + row.to(tl.int64)[:, None] * width + (head * size + i)[None, :]
        tl.store(place, total, mask=live[:, None] & is_channel[None, :])
    keep_inputs(
        entry, tails + sequence * OF.reach, block, OF.channels, OF.taps, OF.padded_taps, OF.reach, OF.window
    )
