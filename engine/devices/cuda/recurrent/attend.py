"""Linear attention: a program walks through a sequence's tiles, for a head and a block of its values. And
Mamba's selective scan, for a block of heads, which adds token after token to the state at the grid point.

A tile has the rows between two grid points, each in the slot that its position determines. So a row's shapes
and order of sums are the same in a prompt, alone, drafted and in a tree. Missing rows count as zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine.batch import recurrent_plan as plan
from engine.devices.cuda.recurrent.keep import NO_SLOT, SEQUENCE_COLUMNS, clear_rows, keep_rows

TILE_COLUMNS = tl.constexpr(plan.TILE_COLUMNS)
NOTHING = tl.constexpr(plan.NOTHING)
DRAFTED = tl.constexpr(plan.DRAFTED)
ADVANCE = tl.constexpr(plan.ADVANCE)
CERTAIN = tl.constexpr(plan.CERTAIN)
PRECISION = tl.constexpr("tf32x3")
"""The precision of products: float32's except for the last bits."""


class HeadConstants(NamedTuple):
    """The constants of a layer's kernel. A program has a block of `block` values, and reads `part` values of
    keys at a time. `by_channel`: each key channel has a decay of its own. `is_delta`: new values are
    differences from what the state has under their keys.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    part: int
    block: int
    by_channel: bool
    is_delta: bool
    rows: int
    window: int


@triton.jit
def _known(rows, window, sources, offset, inside, WIDTH: tl.constexpr):
    """Load columns `offset` of n tokens from the step's rows or the window, each with WIDTH columns."""
    row, is_row, place, is_kept = sources
    mine = rows + row[:, None] * WIDTH + offset[None, :]
    new = tl.load(mine, mask=is_row[:, None] & inside[None, :], other=0.0)
    slot_places = window + place[:, None] * WIDTH + offset[None, :]
    old = tl.load(slot_places, mask=is_kept[:, None] & inside[None, :], other=0.0)
    return tl.where(is_row[:, None], new, old)


@triton.jit
def _totals(decay, decays, sources, offset, inside, WIDTH: tl.constexpr):
    """Return the logarithm of the decay from the grid point up to and including each row."""
    known = _known(decay, decays, sources, offset, inside, WIDTH)
    if known.shape[1] == 1:  # Triton 3.6 compiles no scan of a single column
        totals = tl.cumsum(tl.sum(known, 1), 0)[:, None]
    else:
        totals = tl.cumsum(known, 0)
    return totals


@triton.jit
def _read(query, new, tokens, cells, is_value, DELTA: tl.constexpr, OF: tl.constexpr):
    """Multiply queries and keys with the state, [rows, block], and with each row's key, [rows, rows]."""
    key, decay, keys, decays, sources, head, key_head = tokens
    row = sources[0]
    ROWS: tl.constexpr = OF.rows
    BLOCK: tl.constexpr = OF.block
    slot = tl.arange(0, ROWS)
    lower = slot[:, None] >= slot[None, :]
    seen = tl.zeros([ROWS, BLOCK], tl.float32)
    lacks = tl.zeros([ROWS, BLOCK], tl.float32)
    by_query = tl.zeros([ROWS, ROWS], tl.float32)
    by_key = tl.zeros([ROWS, ROWS], tl.float32)
    for first in range(0, OF.key_dim, OF.part):
        d = first + tl.arange(0, OF.part)
        inside = d < OF.key_dim
        offset = key_head * OF.key_dim + d
        k = _known(key, keys, sources, offset, inside, OF.key_heads * OF.key_dim)
        mine = query + row[:, None] * (OF.key_heads * OF.key_dim) + offset[None, :]
        q = tl.load(mine, mask=new[:, None] & inside[None, :], other=0.0)
        state = tl.load(
            cells + d[:, None] * OF.value_dim, mask=inside[:, None] & is_value[None, :], other=0.0
        )
        far_q, far_k = q, k
        if OF.by_channel:
            total = _totals(decay, decays, sources, head * OF.key_dim + d, inside, OF.heads * OF.key_dim)
            faded = tl.exp(total[:, None, :] - total[None, :, :])
            faded = tl.where(lower[:, :, None], faded * k[None, :, :], 0.0)
            by_query += tl.sum(faded * q[:, None, :], 2)
            by_key += tl.sum(faded * k[:, None, :], 2)
            far_q, far_k = q * tl.exp(total), k * tl.exp(total)
        else:
            by_query = tl.dot(q, tl.trans(k), by_query, input_precision=PRECISION)
            if DELTA:
                by_key = tl.dot(k, tl.trans(k), by_key, input_precision=PRECISION)
        seen = tl.dot(far_q, state, seen, input_precision=PRECISION)
        if DELTA:
            lacks = tl.dot(far_k, state, lacks, input_precision=PRECISION)
    if not OF.by_channel:
        offset = head + tl.zeros([1], tl.int32)
        total = _totals(decay, decays, sources, offset, offset >= 0, OF.heads)
        faded = tl.where(lower, tl.exp(total - tl.trans(total)), 0.0)
        by_query, by_key = by_query * faded, by_key * faded
        seen, lacks = seen * tl.exp(total), lacks * tl.exp(total)
    return seen, lacks, by_query, by_key


@triton.jit
def _solved(low, high, value, strength, lacks, by_key, added):
    """Solve, row after row, for the values that rows add to the state under their keys (delta rule)."""
    slot = tl.arange(0, added.shape[0])
    for t in range(low, high):
        at = (slot == t)[:, None]
        found = tl.sum(tl.where(at, by_key, 0.0), 0)
        recent = tl.sum(found[:, None] * added, 0)
        added = tl.where(at, strength[:, None] * (value - (lacks + recent[None, :])), added)
    return added


@triton.jit
def _advance(tokens, cells, target, added, is_value, OF: tl.constexpr):
    """Write the state after a whole grid of rows to `target`."""
    key, decay, keys, decays, sources, head, key_head = tokens
    last = (tl.arange(0, OF.rows) == OF.rows - 1)[:, None]
    for first in range(0, OF.key_dim, OF.part):
        d = first + tl.arange(0, OF.part)
        inside = d < OF.key_dim
        k = _known(key, keys, sources, key_head * OF.key_dim + d, inside, OF.key_heads * OF.key_dim)
        if OF.by_channel:
            total = _totals(decay, decays, sources, head * OF.key_dim + d, inside, OF.heads * OF.key_dim)
        else:
            offset = head + tl.zeros([1], tl.int32)
            total = _totals(decay, decays, sources, offset, offset >= 0, OF.heads)
        end = tl.sum(tl.where(last, total, 0.0), 0)
        mask = inside[:, None] & is_value[None, :]
        state = tl.load(cells + d[:, None] * OF.value_dim, mask=mask, other=0.0) * tl.exp(end)[:, None]
        weighted = tl.trans(k * tl.exp(end[None, :] - total))
        state = tl.dot(weighted, added, state, input_precision=PRECISION)
        tl.store(target + d[:, None] * OF.value_dim, state, mask=mask)


@triton.jit
def attend(
    query,
    key,
    value,
    decay,
    beta,
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
    OF: tl.constexpr,
):
    """Grid: (sequences, heads * blocks of values). Attend. `drafted` has the states after draft rows. `beta`
    has factors of the values, or of the differences. `keep` then writes the rest of the windows.
    """
    BLOCKS: tl.constexpr = (OF.value_dim + OF.block - 1) // OF.block
    DELTA: tl.constexpr = OF.is_delta
    head = tl.program_id(1) // BLOCKS
    key_head = head // (OF.heads // OF.key_heads)
    entry = sequences + tl.program_id(0) * SEQUENCE_COLUMNS
    state_slot = tl.load(entry).to(tl.int64)
    start, first, kept = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    first_tile, end_tile = tl.load(entry + 5), tl.load(entry + 6)
    slot = tl.arange(0, OF.rows)
    e = tl.program_id(1) % BLOCKS * OF.block + tl.arange(0, OF.block)
    is_value = e < OF.value_dim
    if state_slot == NO_SLOT:
        clear_rows(out, entry, head * OF.value_dim + e, OF.heads * OF.value_dim)
        return
    keys += state_slot * keys_step
    deltas += state_slot * deltas_step
    decays += state_slot * decays_step
    cell = head * (OF.key_dim * OF.value_dim) + e[None, :]
    settled = state + state_slot * state_step + cell
    ahead = drafted + tl.load(entry + 7).to(tl.int64) * (OF.heads * OF.key_dim * OF.value_dim) + cell

    for tile in range(first_tile, end_tile):
        entry = tiles + tile * (TILE_COLUMNS + OF.rows)
        low, high, flags = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        source = tl.load(entry + TILE_COLUMNS + slot)
        is_row = source >= 0
        is_kept = (source < 0) & (source != NOTHING)
        row = tl.where(is_row, source, 0).to(tl.int64)
        place = tl.where(is_row, (start + source - first) % OF.window, tl.where(is_kept, -1 - source, 0))
        sources = (row, is_row, place, is_kept)
        tokens = (key, decay, keys, decays, sources, head, key_head)
        new = (slot >= low) & (slot < high)
        cells = tl.where((flags & DRAFTED) != 0, ahead, settled)

        is_new = new[:, None] & is_value[None, :]
        value_place = row[:, None] * (OF.heads * OF.value_dim) + head * OF.value_dim + e[None, :]
        v = tl.load(value + value_place, mask=is_new, other=0.0)
        delta_place = deltas + place[:, None] * (OF.heads * OF.value_dim) + head * OF.value_dim + e[None, :]
        is_old = ((slot < low) & (source != NOTHING))[:, None] & is_value[None, :]
        added = tl.load(delta_place, mask=is_old, other=0.0)
        if low < high:
            seen, lacks, by_query, by_key = _read(query, new, tokens, cells, is_value, DELTA, OF)
            strength = tl.full([OF.rows], 1.0, tl.float32)
            if beta is not None:
                strength = tl.load(beta + row * OF.heads + head, mask=new, other=0.0)
            if DELTA:
                added = _solved(low, high, v, strength, lacks, by_key, added)
            else:
                added = tl.where(new[:, None], v * strength[:, None], added)
            result = tl.dot(by_query, added, seen, input_precision=PRECISION)
            tl.store(out + value_place, result, mask=is_new)
            tl.store(delta_place, added, mask=is_new & (row >= kept)[:, None])
        if flags & ADVANCE:
            tl.debug_barrier()  # all threads have read the state
            target = tl.where((flags & CERTAIN) != 0, settled, ahead)
            _advance(tokens, cells, target, added, is_value, OF)
        tl.debug_barrier()  # later tiles read what this one wrote


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
