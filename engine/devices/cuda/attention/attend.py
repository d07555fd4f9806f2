"""Attention of tiles of query rows (tokens of one sequence by heads of one KV head) to splits of their keys.

The start of each split, and of each block of keys in it, depends on key places alone, and splits are joined
one by one in order. So a row's sums depend neither on other rows of the batch nor on the tile's size. A row
sees the keys between two places and, in a tree, those whose bits are set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.plan import keys_of, owner_of
from engine.devices.cuda.attention.softmax import fade, join, mean, share, tanh
from engine.devices.cuda.attention.write import decode, scale_at


@triton.jit
def popcount(bits):
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((bits * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def highest_bits(bits, count):
    """Return the `count` highest set bits of uint64, at least one."""
    below = tl.zeros(bits.shape, tl.uint64)  # binary search for the number of low bits to clear
    for power in tl.static_range(5, -1, -1):
        many = popcount(bits >> (below + ((1 << power) - 1))) > count
        below += many.to(tl.uint64) << power
    return (bits >> below) << below


@triton.jit
def visible_keys(row, live, place, first_key, visible, tree_start, sequence, window, WINDOWED: tl.constexpr):
    """Return the keys that a row sees: [first, end), and key `fork` + i if bit i of `path` is set."""
    position, end, fork = place, place + 1, 0
    path = tl.zeros(row.shape, tl.uint64)
    if visible is not None:
        start = tl.load(tree_start + sequence)
        if start >= 0:
            fork = start
            path = tl.load(visible + row, mask=live, other=1).to(tl.uint64, bitcast=True)
            position = fork + popcount(path) - 1
            end = tl.full(row.shape, 0, tl.int32) + fork
            if WINDOWED:
                path = highest_bits(path, window)
    first = tl.full(row.shape, 0, tl.int32) + first_key
    if WINDOWED:
        first = tl.maximum(first, position - window + 1)
    return first, end, fork, path


@triton.jit
def is_visible(key, first, end, fork, path, TREES: tl.constexpr):
    """Return whether each row sees each key: bool [rows, keys]."""
    seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
    if TREES:
        bit = tl.minimum(tl.maximum(key - fork, 0), 63).to(tl.uint64)
        on_path = ((path[:, None] >> bit[None, :]) & 1) != 0
        seen = seen | (on_path & (key >= fork)[None, :])
    return seen


@triton.jit
def _rows_of(
    pool, place, scales, scale_place, inside, DIM: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr
):
    """Load stored rows [keys, PADDED]; return them and the scale factors of coded rows."""
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
    return stored, factor


@triton.jit
def _attend_to(
    begin,
    stop,
    low,
    state,
    queries,
    cache,
    scaling,
    EDGE: tl.constexpr,
    LAYER: tl.constexpr,
    TILES: tl.constexpr,
):
    """Add the keys [begin, stop) of `cache` to `state`. Without EDGE all rows see all of them.

    Weights are summed by a product with ones, whose order does not depend on how threads share a tile.
    """
    total, mass, top = state
    q, q_tail, first, end, fork, path = queries
    key_side, value_side, blocks, kv_head = cache
    keys, key_scales, keys_block, keys_token, keys_offset = key_side
    values, value_scales, values_block, values_token, values_offset = value_side
    scale, softcap = scaling
    ones = tl.full([TILES.keys, 16], 1.0, tl.float32).to(TILES.multiplied)
    for start in range(begin, stop, TILES.keys):
        key = start + tl.arange(0, TILES.keys)
        inside = key < stop
        if EDGE:
            inside = inside & (key >= low)
        block = tl.load(blocks + key // LAYER.page, mask=inside, other=0).to(tl.int64)
        token = key % LAYER.page
        place = block * keys_block + token * keys_token + keys_offset
        scale_place = scale_at(0, block, token, kv_head, keys_block, keys_token)
        k, k_factor = _rows_of(
            keys, place, key_scales, scale_place, inside, LAYER.key_dim, LAYER.key_padded, LAYER.fp8
        )
        k = k.to(TILES.multiplied)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if LAYER.tail_padded:
            TAIL: tl.constexpr = LAYER.key_dim - LAYER.key_padded
            place += LAYER.key_padded
            k_tail, _ = _rows_of(keys, place, None, None, inside, TAIL, LAYER.tail_padded, LAYER.fp8)
            scores = tl.dot(q_tail, tl.trans(k_tail.to(TILES.multiplied)), scores, input_precision="ieee")
        scores = scores * scale
        if key_scales is not None:
            scores = scores * k_factor[None, :]
        if TILES.softcap:
            scores = tanh(scores) * softcap
        if EDGE:
            seen = is_visible(key, first, end, fork, path, TILES.trees) & inside[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        faded, offset = fade(top, new)
        weights = tl.exp2(scores - offset[:, None])
        mass = tl.dot(weights.to(TILES.multiplied), ones, mass * faded[:, None], input_precision="ieee")
        if LAYER.values_in_keys and LAYER.key_padded == LAYER.value_padded:  # later columns are not stored
            v = k
        else:
            place = block * values_block + token * values_token + values_offset
            scale_place = scale_at(0, block, token, kv_head, values_block, values_token)
            v, v_factor = _rows_of(
                values,
                place,
                value_scales,
                scale_place,
                inside,
                LAYER.value_dim,
                LAYER.value_padded,
                LAYER.fp8,
            )
            v = v.to(TILES.multiplied)
            if value_scales is not None:
                weights = weights * v_factor[None, :]
        total = tl.dot(weights.to(TILES.multiplied), v, total * faded[:, None], input_precision="ieee")
        top = new
    return total, mass, top


@triton.jit
def _queries(place, live, LAYER: tl.constexpr, MULTIPLIED: tl.constexpr):
    """Load query rows from `place`, in two parts: for a key's first padded values, and for the rest."""
    d = tl.arange(0, LAYER.key_padded)
    inside = live[:, None] & (d < LAYER.key_dim)[None, :]
    q = tl.load(place + d[None, :], mask=inside, other=0.0).to(MULTIPLIED)
    q_tail = q
    if LAYER.tail_padded:
        d = LAYER.key_padded + tl.arange(0, LAYER.tail_padded)
        inside = live[:, None] & (d < LAYER.key_dim)[None, :]
        q_tail = tl.load(place + d[None, :], mask=inside, other=0.0).to(MULTIPLIED)
    return q, q_tail


@triton.jit
def _seen_by_all(
    begin, stop, oldest, newest, first_key, first_of_all, tree_start, sequence, window, TILES: tl.constexpr
):
    """Return the begin and end, within the keys [begin, stop), of the blocks of keys that need no mask: rows
    at places from `oldest` to `newest` see all of these keys.
    """
    free = begin
    if TILES.windowed:
        free = tl.maximum(free, newest - window + 1)
    if first_key is not None:
        free = tl.maximum(free, first_of_all)
    free = tl.minimum(tl.cdiv(free, TILES.keys) * TILES.keys, stop)
    edge = oldest + 1
    if tree_start is not None:
        start = tl.load(tree_start + sequence)
        edge = tl.where(start >= 0, tl.minimum(edge, start), edge)
    return free, tl.maximum(tl.minimum(edge, stop) // TILES.keys * TILES.keys, free)


@triton.jit
def _split(split, seen, queries, cache, scaling, LAYER: tl.constexpr, TILES: tl.constexpr):
    """Return the mean of a split's values for each row, and the logarithm of the sum of weights."""
    low, high, oldest, first_key, first_of_all, tree_start, sequence, window = seen
    begin = tl.maximum(low // TILES.keys * TILES.keys, split * TILES.split)
    stop = tl.minimum(high, split * TILES.split + TILES.split)
    free, edge = _seen_by_all(
        begin, stop, oldest, high - 1, first_key, first_of_all, tree_start, sequence, window, TILES
    )
    ROWS: tl.constexpr = TILES.tokens * TILES.members
    PADDED: tl.constexpr = LAYER.value_padded
    state = (
        tl.zeros([ROWS, PADDED], tl.float32),
        tl.zeros([ROWS, 16], tl.float32),
        tl.full([ROWS], float("-inf"), tl.float32),
    )
    bounds = (begin, free, edge, stop)
    for part in tl.static_range(3):
        if part > 0 or TILES.windowed or first_key is not None:
            state = _attend_to(
                bounds[part], bounds[part + 1], low, state, queries, cache, scaling, part != 1, LAYER, TILES
            )
    total, mass, top = state
    return mean(total, tl.max(mass, 1), top)


@triton.jit
def _join_rows(parts, masses, is_joined, ROWS: tl.constexpr, LAYER: tl.constexpr):
    """Join a split, the program's second ROWS rows of `parts`, to the splits before it, the program's first
    ROWS rows. Join 16 rows at a time: registers cannot hold both parts.
    """
    tl.debug_barrier()
    d = tl.arange(0, LAYER.value_padded)
    inside = (d < LAYER.value_dim)[None, :]
    for first in range(0, ROWS, 16):
        row = tl.program_id(0).to(tl.int64) * (2 * ROWS) + first + tl.arange(0, 16)
        weight = tl.load(masses + 2 * (row + ROWS))
        joined = is_joined & (row >= 0)
        mass = tl.load(masses + 2 * row, mask=joined, other=0.0)
        top = tl.load(masses + 2 * row + 1, mask=joined, other=float("-inf"))
        faded, counted, mass, top = join(mass, top, weight)
        place = parts + row[:, None] * LAYER.value_dim + d[None, :]
        before = tl.load(place, mask=inside & is_joined, other=0.0)
        part = tl.load(place + ROWS * LAYER.value_dim, mask=inside, other=0.0)
        tl.store(masses + 2 * row, mass)
        tl.store(masses + 2 * row + 1, top)
        tl.store(place, before * faded[:, None] + part * counted[:, None], mask=inside)
    tl.debug_barrier()


@triton.jit
def _finish(out, sinks, row, head, mean_of_all, mass, top, live, LAYER: tl.constexpr):
    """Store rows' means, scaled by the share of the weight that is not the sink's."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        mean_of_all = mean_of_all * share(top, mass, sink)[:, None]
    e = tl.arange(0, LAYER.value_padded)
    place = out + ((row.to(tl.int64) * LAYER.heads + head) * LAYER.value_dim)[:, None] + e[None, :]
    tl.store(place, mean_of_all.to(out.dtype.element_ty), mask=live[:, None] & (e < LAYER.value_dim)[None, :])


# A table's blocks and slots may begin anywhere in those of all tables.
@triton.jit(do_not_specialize=["table", "slots", "num_tiles", "tile_tokens", "table_row", "window", "alone"])
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
    full_start,
    query_start,
    context_len,
    table,
    slots,
    first_key,
    visible,
    tree_start,
    num_tiles,
    tile_tokens,
    table_row,
    window,
    alone,
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
    LAYER: tl.constexpr,
    TILES: tl.constexpr,
):
    """Process work items until none are left: each is a tile or a split, for one part of a KV head's group.
    `tiles` explains the constants.

    Without `joins` an item is a split of a tile (`plan` counts them): first all full splits, then each tile's
    last. The results of a tile with several splits go to `parts` for `merge`. With `joins` an item is a tile
    without full splits in the plan but with several splits (or one, if `alone`), which are joined in `parts`.
    """
    PARTS: tl.constexpr = (LAYER.group + TILES.members - 1) // TILES.members
    COLUMNS: tl.constexpr = LAYER.heads // LAYER.group * PARTS
    ROWS: tl.constexpr = TILES.tokens * TILES.members
    m = tl.arange(0, ROWS)
    e = tl.arange(0, LAYER.value_padded)
    num_full = 0
    if not TILES.joins:
        num_full = tl.load(full_start + num_tiles)
    for work in range(tl.program_id(0), (num_full + num_tiles) * COLUMNS, tl.num_programs(0)):
        item, column = work // COLUMNS, work % COLUMNS
        tile = item - num_full
        if TILES.joins:
            tile = num_tiles - 1 - item  # a sequence's last rows see the most keys
        elif item < num_full:
            tile = owner_of(item, full_start, num_tiles)
        owner = tl.load(tile_sequence + tile)
        sequence = tl.maximum(owner, 0)
        first_row = tl.load(tile_row + tile)
        end_row, origin, first_of_all, low, high = keys_of(
            sequence,
            first_row,
            query_start,
            context_len,
            first_key,
            tree_start,
            window,
            TILES.tokens,
            TILES.windowed,
        )
        split, end_split = low // TILES.split, tl.cdiv(high, TILES.split)
        splits = end_split - split
        full = tl.load(full_start + tile)
        listed = tl.load(full_start + tile + 1) > full
        if TILES.joins:
            taken = (owner >= 0) & (not listed) & ((splits > 1) | (alone != 0))
        else:
            taken = (owner >= 0) & (listed | (splits == 1))
            split = tl.where(item < num_full, split + item - full, end_split - 1)
            end_split = split + 1
        if taken:
            kv_head = column // PARTS
            member = column % PARTS * TILES.members + m % TILES.members
            head = kv_head * LAYER.group + member
            token = m // TILES.members
            row = first_row + token
            live = (row < end_row) & (member < LAYER.group)
            live = live & (tl.load(slots + row, mask=live, other=-1) >= 0)
            q_place = query + row.to(tl.int64)[:, None] * query_row + head[:, None] * query_head
            q, q_tail = _queries(q_place, live, LAYER, TILES.multiplied)
            first, end, fork, path = visible_keys(
                row, live, origin + row, first_of_all, visible, tree_start, sequence, window, TILES.windowed
            )
            queries = (q, q_tail, first, end, fork, path)
            key_side = (keys, key_scales, keys_block, keys_token, kv_head * keys_head)
            value_side = (values, value_scales, values_block, values_token, kv_head * values_head)
            cache = (key_side, value_side, table + sequence * table_row, kv_head)
            mask = live[:, None] & (e < LAYER.value_dim)[None, :]
            first_split, rows = split, tl.program_id(0).to(tl.int64) * (2 * ROWS) + m
            seen = (low, high, origin + first_row, first_key, first_of_all, tree_start, sequence, window)
            for split in range(first_split, end_split):
                total, weight = _split(split, seen, queries, cache, (scale, softcap), LAYER, TILES)
                if TILES.joins:
                    # The compiler cannot know that this is 0; otherwise it would keep addresses in registers.
                    second = rows + ROWS + tl.load(full_start, volatile=True)
                    place = parts + second[:, None] * LAYER.value_dim + e[None, :]
                    if LAYER.value_dim == LAYER.value_padded:
                        tl.store(place, total)
                    else:
                        tl.store(place, total, mask=(e < LAYER.value_dim)[None, :])
                    tl.store(masses + 2 * second, weight)
                    _join_rows(parts, masses, split > first_split, ROWS, LAYER)
                elif splits > 1:
                    kept = (token.to(tl.int64) + item * tile_tokens) * LAYER.heads + head
                    tl.store(masses + kept, weight, mask=live)
                    tl.store(parts + kept[:, None] * LAYER.value_dim + e[None, :], total, mask=mask)
                else:
                    _finish(out, sinks, row, head, total, 1.0, weight, live, LAYER)
            if TILES.joins:
                total = tl.load(parts + rows[:, None] * LAYER.value_dim + e[None, :], mask=mask, other=0.0)
                mass = tl.load(masses + 2 * rows, mask=live, other=1.0)
                top = tl.load(masses + 2 * rows + 1, mask=live, other=0.0)
                _finish(out, sinks, row, head, total / mass[:, None], mass, top, live, LAYER)
                tl.debug_barrier()
