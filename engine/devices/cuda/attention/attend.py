"""Attends for a tile of query rows, tokens of one sequence by heads of one KV head, to a split of its keys.

Where splits and the blocks of keys in them begin depends on the keys' places alone, so a row's sums do not
depend on the rows beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.codes import decode
from engine.devices.cuda.attention.plan import keys_of
from engine.devices.cuda.attention.sight import sees, sight
from engine.devices.cuda.attention.softmax import fade, mean, share, tanh
from engine.devices.cuda.attention.write import scale_at


@triton.jit
def _rows_of(
    pool,
    place,
    scales,
    scale_place,
    inside,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    FP8: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    """Stored rows [keys, PADDED], and the factors of coded ones."""
    d = tl.arange(0, PADDED)
    mask = inside[:, None]
    if DIM != PADDED:
        mask = mask & (d < DIM)[None, :]
    stored = tl.load(pool + place[:, None] + d[None, :], mask=mask, other=0)
    factor = 1.0
    if scales is not None:
        stored = decode(stored, FP8)
        factor = tl.load(scales + scale_place, mask=inside, other=0.0)
        if FP8:
            factor = factor * 256.0
    return stored.to(MULTIPLIED), factor


@triton.jit
def _attend_to(
    begin,
    stop,
    low,
    state,
    q,
    q_tail,
    row_sight,
    keys,
    key_scales,
    values,
    value_scales,
    blocks,
    keys_block,
    keys_token,
    keys_offset,
    values_block,
    values_token,
    values_offset,
    kv_head,
    scale,
    softcap,
    EDGE: tl.constexpr,
    TREES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    FP8: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    """Adds the keys [begin, stop) to `state`. Without EDGE all rows see all of them."""
    total, mass, top = state
    first, end, fork, path = row_sight
    for start in range(begin, stop, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < stop
        if EDGE:
            inside = inside & (key >= low)
        block = tl.load(blocks + key // PAGE, mask=inside, other=0).to(tl.int64)
        token = key % PAGE
        place = block * keys_block + token * keys_token + keys_offset
        k, k_factor = _rows_of(
            keys,
            place,
            key_scales,
            scale_at(0, block, token, kv_head, keys_block, keys_token),
            inside,
            KEY_DIM,
            KEY_PADDED,
            FP8,
            MULTIPLIED,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if TAIL_PADDED:
            k_tail, _ = _rows_of(
                keys,
                place + KEY_PADDED,
                None,
                None,
                inside,
                KEY_DIM - KEY_PADDED,
                TAIL_PADDED,
                FP8,
                MULTIPLIED,
            )
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        scores = scores * scale
        if key_scales is not None:
            scores = scores * k_factor[None, :]
        if SOFTCAP:
            scores = tanh(scores) * softcap
        if EDGE:
            seen = sees(key, first, end, fork, path, TREES) & inside[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        faded, offset = fade(top, new)
        weights = tl.exp2(scores - offset[:, None])
        mass = mass * faded + tl.sum(weights, 1)
        if VALUES_IN_KEYS and KEY_PADDED == VALUE_PADDED:  # what lies behind the values is not stored
            v = k
        else:
            v, v_factor = _rows_of(
                values,
                block * values_block + token * values_token + values_offset,
                value_scales,
                scale_at(0, block, token, kv_head, values_block, values_token),
                inside,
                VALUE_DIM,
                VALUE_PADDED,
                FP8,
                MULTIPLIED,
            )
            if value_scales is not None:
                weights = weights * v_factor[None, :]
        total = tl.dot(weights.to(MULTIPLIED), v, total * faded[:, None], input_precision="ieee")
        top = new
    return total, mass, top


@triton.jit
def _queries(
    place,
    live,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    """Load rows from `place`: the part for the first KEY_PADDED values of a key, and the rest."""
    d = tl.arange(0, KEY_PADDED)
    q = tl.load(place + d[None, :], mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0).to(MULTIPLIED)
    q_tail = q
    if TAIL_PADDED:
        d = KEY_PADDED + tl.arange(0, TAIL_PADDED)
        inside = live[:, None] & (d < KEY_DIM)[None, :]
        q_tail = tl.load(place + d[None, :], mask=inside, other=0.0).to(MULTIPLIED)
    return q, q_tail


@triton.jit
def _seen_by_all(
    begin,
    stop,
    oldest,
    newest,
    first_key,
    first_of_all,
    tree_start,
    sequence,
    window,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return the begin and end, within the keys [begin, stop), of the blocks of KEYS without a mask: rows at
    places from `oldest` to `newest` see all of them.
    """
    free = begin
    if WINDOWED:
        free = tl.maximum(free, newest - window + 1)
    if first_key is not None:
        free = tl.maximum(free, first_of_all)
    free = tl.minimum(tl.cdiv(free, KEYS) * KEYS, stop)
    edge = oldest + 1
    if tree_start is not None:
        start = tl.load(tree_start + sequence)
        edge = tl.where(start >= 0, tl.minimum(edge, start), edge)
    return free, tl.maximum(tl.minimum(edge, stop) // KEYS * KEYS, free)


@triton.jit(do_not_specialize=["first_tile", "num_tiles", "tile_tokens", "table_row", "window"])
def attend(
    query,
    keys,
    key_scales,
    values,
    value_scales,
    sinks,
    out,
    parts,
    masses,
    tile_sequence,
    tile_row,
    query_start,
    context_len,
    table,
    slots,
    first_key,
    visible,
    tree_start,
    first_tile,
    num_tiles,
    tile_tokens,
    table_row,
    window,
    query_row,
    query_head,
    keys_block,
    keys_token,
    keys_head,
    values_block,
    values_token,
    values_head,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    MULTIPLIED: tl.constexpr,
):
    """Programs: tile, KV head and part of its group, split of the tile's keys. A tile has TOKENS rows of
    MEMBERS heads. Where it has several splits, the part of each is left to `merge`. SPLIT 0: no splits.
    Of keys with more than KEY_PADDED values the others are multiplied apart; TAIL_PADDED 0: there are none.
    """
    tile = first_tile + tl.program_id(0)
    sequence = tl.load(tile_sequence + tile)
    if sequence < 0:
        return
    first_row = tl.load(tile_row + tile)
    end_row, origin, first_of_all, low, high = keys_of(
        sequence, first_row, query_start, context_len, first_key, tree_start, window, TOKENS, WINDOWED
    )
    begin, stop, splits = low // KEYS * KEYS, high, 1
    if SPLIT:
        split = low // SPLIT + tl.program_id(2)
        splits = tl.cdiv(high, SPLIT) - low // SPLIT
        begin = tl.maximum(begin, split * SPLIT)
        stop = tl.minimum(stop, split * SPLIT + SPLIT)
        if begin >= stop:
            return

    PARTS: tl.constexpr = (GROUP + MEMBERS - 1) // MEMBERS
    kv_head = tl.program_id(1) // PARTS
    m = tl.arange(0, TOKENS * MEMBERS)
    member = tl.program_id(1) % PARTS * MEMBERS + m % MEMBERS
    head = kv_head * GROUP + member
    token = m // MEMBERS
    row = first_row + token
    live = (row < end_row) & (member < GROUP)
    live = live & (tl.load(slots + row, mask=live, other=-1) >= 0)
    q_place = query + row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head
    q, q_tail = _queries(q_place, live, KEY_DIM, KEY_PADDED, TAIL_PADDED, MULTIPLIED)
    row_sight = sight(row, live, origin + row, first_of_all, visible, tree_start, sequence, window, WINDOWED)

    oldest, newest = origin + first_row, high - 1
    free, edge = _seen_by_all(
        begin, stop, oldest, newest, first_key, first_of_all, tree_start, sequence, window, KEYS, WINDOWED
    )
    state = (
        tl.zeros([TOKENS * MEMBERS, VALUE_PADDED], tl.float32),
        tl.zeros([TOKENS * MEMBERS], tl.float32),
        tl.full([TOKENS * MEMBERS], float("-inf"), tl.float32),
    )
    blocks = table + sequence * table_row
    keys_offset, values_offset = kv_head * keys_head, kv_head * values_head
    bounds = (begin, free, edge, stop)
    for part in tl.static_range(3):
        if part > 0 or WINDOWED or first_key is not None:
            state = _attend_to(
                bounds[part],
                bounds[part + 1],
                low,
                state,
                q,
                q_tail,
                row_sight,
                keys,
                key_scales,
                values,
                value_scales,
                blocks,
                keys_block,
                keys_token,
                keys_offset,
                values_block,
                values_token,
                values_offset,
                kv_head,
                scale,
                softcap,
                part != 1,
                visible is not None,
                SOFTCAP,
                PAGE,
                KEYS,
                KEY_DIM,
                VALUE_DIM,
                KEY_PADDED,
                TAIL_PADDED,
                VALUE_PADDED,
                VALUES_IN_KEYS,
                FP8,
                MULTIPLIED,
            )

    total, mass, top = state
    result, weight = mean(total, mass, top)
    e = tl.arange(0, VALUE_PADDED)
    mask = live[:, None] & (e < VALUE_DIM)[None, :]
    if splits == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
            result = result * share(weight, 1.0, sink)[:, None]
        place = (row.to(tl.int64) * HEADS + head) * VALUE_DIM
        tl.store(out + place[:, None] + e[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        kept = (tl.program_id(2).to(tl.int64) * num_tiles + tl.program_id(0)) * tile_tokens + token
        kept = kept * HEADS + head
        tl.store(masses + kept, weight, mask=live)
        tl.store(parts + kept[:, None] * VALUE_DIM + e[None, :], result, mask=mask)
