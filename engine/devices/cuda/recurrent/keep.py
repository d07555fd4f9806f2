"""The writes of a step's rows to their state slots' windows, for later rows to read."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.batch import recurrent_plan as plan

SEQUENCE_COLUMNS = tl.constexpr(plan.SEQUENCE_COLUMNS)
NO_SLOT = tl.constexpr(plan.NO_SLOT)
_ROWS = tl.constexpr(16)


@triton.jit
def keep_rows(
    rows, stride, source, window, entry, column, is_column, WIDTH: tl.constexpr, WINDOW: tl.constexpr
):
    """Write the columns `source` of a sequence's rows to these columns of its window."""
    start, first = tl.load(entry + 1), tl.load(entry + 2)
    kept, end = tl.load(entry + 3), tl.load(entry + 4)
    for begin in range(kept, end, _ROWS):
        row = begin + tl.arange(0, _ROWS)
        inside = (row < end)[:, None] & is_column[None, :]
        values = tl.load(rows + row.to(tl.int64)[:, None] * stride + source[None, :], mask=inside)
        place = (start + row - first) % WINDOW
        tl.store(window + place[:, None] * WIDTH + column[None, :], values, mask=inside)


@triton.jit
def clear_rows(out, entry, column, WIDTH: tl.constexpr):
    """Clear these columns of the rows of a sequence without a state slot."""
    first, end = tl.load(entry + 2), tl.load(entry + 4)
    for begin in range(first, end, _ROWS):
        row = begin + tl.arange(0, _ROWS)
        inside = (row < end)[:, None] & (column < WIDTH)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], 0.0, mask=inside)


@triton.jit
def keep(
    key,
    decay,
    keys,
    decays,
    sequences,
    keys_step,
    decays_step,
    KEYS: tl.constexpr,
    DECAYS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (sequences, blocks of columns). Keep a block of key columns and of decay columns. Heads share
    keys, so this runs after the kernels of all heads.
    """
    entry = sequences + tl.program_id(0) * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK < KEYS:
        kept = keys + state_slot * keys_step
        keep_rows(key, KEYS, column, kept, entry, column, column < KEYS, KEYS, WINDOW)
    if tl.program_id(1) * BLOCK < DECAYS:
        kept = decays + state_slot * decays_step
        keep_rows(decay, DECAYS, column, kept, entry, column, column < DECAYS, DECAYS, WINDOW)
