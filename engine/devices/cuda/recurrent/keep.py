"""The writes of a step's rows to their state slots' windows, for later rows to read."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine.batch import recurrent_plan as plan

SEQUENCE_COLUMNS = tl.constexpr(plan.SEQUENCE_COLUMNS)
NO_SLOT = tl.constexpr(plan.NO_SLOT)
_ROWS = tl.constexpr(16)


class KeptConstants(NamedTuple):
    """The numbers of a row's key columns and decay columns, and how many of each a program keeps."""

    keys: int
    decays: int
    window: int
    block: int


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
def keep_block(number, key, decay, keys, decays, sequences, keys_step, decays_step, OF: tl.constexpr):
    """Keep a block of a sequence's key columns and of its decay columns, the `number`th of all sequences'.
    Heads share keys, so this runs after the kernels of all heads.
    """
    COLUMNS: tl.constexpr = OF.keys if OF.keys > OF.decays else OF.decays
    BLOCKS: tl.constexpr = (COLUMNS + OF.block - 1) // OF.block
    entry = sequences + number // BLOCKS * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    first = number % BLOCKS * OF.block
    column = first + tl.arange(0, OF.block)
    if first < OF.keys:
        kept = keys + state_slot * keys_step
        keep_rows(key, OF.keys, column, kept, entry, column, column < OF.keys, OF.keys, OF.window)
    if first < OF.decays:
        kept = decays + state_slot * decays_step
        keep_rows(decay, OF.decays, column, kept, entry, column, column < OF.decays, OF.decays, OF.window)


@triton.jit
def keep(key, decay, keys, decays, sequences, keys_step, decays_step, OF: tl.constexpr):
    """Grid: (blocks of columns of all sequences). Keep the blocks."""
    keep_block(tl.program_id(0), key, decay, keys, decays, sequences, keys_step, decays_step, OF)
