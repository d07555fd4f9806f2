"""Mamba's selective scan: a program walks through a sequence's tiles, for a block of heads, and adds token
after token to the state at the grid point.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.recurrent.attend import ADVANCE, CERTAIN, DRAFTED, TILE_COLUMNS
from engine.devices.cuda.recurrent.keep import NO_SLOT, SEQUENCE_COLUMNS, clear_rows, keep_rows


@triton.jit
def _token_at(source, rows, window, column, inside, WIDTH: tl.constexpr):
    """Load a token from the step's rows or from the state slot's window, both with WIDTH columns."""
    mine = rows + source.to(tl.int64) * WIDTH
    return tl.load(
        tl.where(source >= 0, mine, window + (-1 - source) * WIDTH) + column, mask=inside, other=0.0
    )


@triton.jit
def scan(
    query,
    key,
    value,
    times,
    rates,
    out,
    state,
    drafted,
    keys,
    deltas,
    decays,
    sequences,
    tiles,
    state_step,
    keys_step,
    deltas_step,
    decays_step,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid: (sequences, blocks of heads). Scan; `keep` then writes the rest of the windows."""
    entry = sequences + tl.program_id(0) * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, KEY_PADDED)
    is_head, is_key = h < HEADS, d < KEY_DIM
    if state_slot == NO_SLOT:
        clear_rows(out, entry, h, HEADS)
        return
    keys += state_slot * keys_step
    deltas += state_slot * deltas_step
    decays += state_slot * decays_step
    cell = h[:, None] * KEY_DIM + d[None, :]
    is_cell = is_head[:, None] & is_key[None, :]
    settled = state + state_slot * state_step + cell
    ahead = drafted + tl.load(entry + 7).to(tl.int64) * (HEADS * KEY_DIM) + cell
    rate = tl.load(rates + cell, mask=is_cell, other=0.0)
    for tile in range(tl.load(entry + 5), tl.load(entry + 6)):
        of = tiles + tile * (TILE_COLUMNS + ROWS)
        low, high, flags = tl.load(of), tl.load(of + 1), tl.load(of + 2)
        held = tl.load(tl.where((flags & DRAFTED) != 0, ahead, settled), mask=is_cell, other=0.0)
        for t in range(high):
            source = tl.load(of + TILE_COLUMNS + t)
            k = _token_at(source, key, keys, d, is_key, KEY_DIM)
            v = _token_at(source, value, deltas, h, is_head, HEADS)
            time = _token_at(source, times, decays, h, is_head, HEADS)
            held = held * tl.exp(time[:, None] * rate) + v[:, None] * k[None, :]
            if t >= low:
                row = source.to(tl.int64)
                q = tl.load(query + row * KEY_DIM + d, mask=is_key, other=0.0)
                tl.store(out + row * HEADS + h, tl.sum(held * q[None, :], 1), mask=is_head)
        tl.debug_barrier()  # all threads have read the state
        if flags & ADVANCE:
            tl.store(tl.where((flags & CERTAIN) != 0, settled, ahead), held, mask=is_cell)
        tl.debug_barrier()  # later tiles read it
    keep_rows(value, HEADS, h, deltas, entry, h, is_head, HEADS, WINDOW)
