"""The convolution: a program walks through a sequence's rows for a block of channels."""

from __future__ import annotations

import triton
import triton.language as tl

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
