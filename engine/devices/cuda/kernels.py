"""The decoder's kernels between matrix products. They round where Transformers' modules round."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.write import scale_at, store_row
from engine.model.program import SWIGLU_LIMIT, SWIGLU_SLOPE, Activation, NormKind

_PLAIN = tl.constexpr(int(NormKind.PLAIN))
_CENTRED = tl.constexpr(int(NormKind.CENTRED))
_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_SLOPE, _LIMIT = tl.constexpr(SWIGLU_SLOPE), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def rounded(values, like):
    """Round to the dtype that `like` points to; return float32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def weighted(values, weight, like, KIND: tl.constexpr):
    """Multiply normalized values by the weights of a norm of this kind, without rounding."""
    if KIND == _CENTRED:
        return values * (1.0 + weight)
    if KIND == _PLAIN:
        values = rounded(values, like)
    return values * weight


@triton.jit
def _summed(added, shares, row, i, inside, like, CHOSEN: tl.constexpr, SIZE: tl.constexpr):
    """Load values `i` of a row of `added`, or with `shares` [rows, CHOSEN] of the row's experts' rows, times
    their shares, and sum these. Each product is rounded to the dtype of `shares`, the sum as `like`.
    """
    if shares is None:
        total = tl.load(added + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(i.shape, tl.float32)
        for number in tl.static_range(CHOSEN):
            at = row * CHOSEN + number
            values = tl.load(added + at * SIZE + i, mask=inside, other=0.0).to(tl.float32)
            total += rounded(values * tl.load(shares + at).to(tl.float32), shares)
        total = rounded(total, like)
    return total


@triton.jit
def _normed(values, weight, i, inside, epsilon, like, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Norm a row's values, and round them as `like`."""
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    return rounded(weighted(values, weights, like, KIND), like)


@triton.jit
def combine(rows, shares, out, CHOSEN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (rows of `out`, blocks). Add up the rows of a row's experts, times their `shares`."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = _summed(rows, shares, row, i, i < SIZE, out, CHOSEN, SIZE)
    tl.store(out + row * SIZE + i, total.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def add_norm(
    added,
    shares,
    beside,
    opening,
    sum_norm,
    beside_norm,
    added_norm,
    residual,
    multiplier,
    weight,
    router_weight,
    read_weight,
    out,
    epsilon,
    factor,
    KIND: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Add a row of `added`, or with `shares` the sum of CHOSEN of them, to `residual` and, if there is a
    `weight`, write the normed sum to `out`. To what is added, first the row of `beside` is added, times the
    sigmoid of its `opening`, if given, and both normed if there is a `sum_norm`; it is normed if there is an
    `added_norm`, and multiplied by `factor` if given. The sum is multiplied by `multiplier`, if any. Without
    `added` the sum is the residual. With a `router_weight` two more normed sums follow all rows of `out`.
    """
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    row = tl.program_id(0).to(tl.int64)
    place = row * SIZE + i
    values = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        more = _summed(added, shares, row, i, inside, residual, CHOSEN, SIZE)
        if sum_norm is not None:
            more = _normed(more, sum_norm, i, inside, epsilon, residual, KIND, SIZE)
        if beside is not None:
            other = tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
            if opening is not None:
                open = 1.0 / (1.0 + tl.exp(-tl.load(opening + row).to(tl.float32)))
                other = rounded(other * rounded(open, residual), residual)
            if beside_norm is not None:
                other = _normed(other, beside_norm, i, inside, epsilon, residual, KIND, SIZE)
            more = rounded(other + more, residual)
        if added_norm is not None:
            more = _normed(more, added_norm, i, inside, epsilon, residual, KIND, SIZE)
        if factor is not None:
            more = rounded(more * factor, residual)
        values = rounded(values + more, residual)
        if multiplier is not None:
            values = rounded(values * tl.load(multiplier).to(tl.float32), residual)
        tl.store(residual + place, values.to(residual.dtype.element_ty), mask=inside)
    if weight is not None:
        normed = _normed(values, weight, i, inside, epsilon, out, KIND, SIZE)
        tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)
    if router_weight is not None:
        all_rows = tl.num_programs(0).to(tl.int64) * SIZE
        scored = _normed(values, router_weight, i, inside, epsilon, out, KIND, SIZE)
        tl.store(out + all_rows + place, scored.to(out.dtype.element_ty), mask=inside)
        read = _normed(values, read_weight, i, inside, epsilon, out, KIND, SIZE)
        tl.store(out + 2 * all_rows + place, read.to(out.dtype.element_ty), mask=inside)


@triton.jit
def token_vectors(
    made,
    token_ids,
    embeddings,
    weight,
    epsilon,
    factor,
    multiplier,
    sum_factor,
    KIND: tl.constexpr,
    LAYERS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (rows, LAYERS). Turn the product of a row's embedding into a layer's vector, in place."""
    row, layer, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PADDED)
    inside = i < SIZE
    place = made + (row * LAYERS + layer) * SIZE + i
    values = rounded(tl.load(place, mask=inside, other=0.0).to(tl.float32) * factor, made)
    weights = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    values = rounded(weighted(values, weights, made, KIND), made)
    own = (tl.load(token_ids + row) * LAYERS + layer) * SIZE + i
    own = rounded(tl.load(embeddings + own, mask=inside, other=0.0).to(tl.float32) * multiplier, made)
    total = rounded(values + own, made) * sum_factor
    tl.store(place, total.to(made.dtype.element_ty), mask=inside)


@triton.jit
def _turned(
    head,
    norm,
    cosines,
    sines,
    epsilon,
    KIND: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Return a head's query or key, normed if there is a `norm`, with its first `ROTATED` values rotated by
    these cosines and sines.
    """
    d = tl.arange(0, PADDED)
    inside, turns = d < DIM, d < ROTATED
    own = tl.load(head + d, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(own * own, 0) / DIM + epsilon)
        own_weight = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        own = rounded(weighted(own * scale, own_weight, head, KIND), head)
    if ROTATED == 0:
        return own
    opposite = (d + ROTATED // 2) % ROTATED
    other = tl.load(head + opposite, mask=turns, other=0.0).to(tl.float32)
    if norm is not None:
        other_weight = tl.load(norm + opposite, mask=turns, other=0.0).to(tl.float32)
        other = rounded(weighted(other * scale, other_weight, head, KIND), head)
    other = tl.where(d < ROTATED // 2, -other, other)
    cosine = tl.load(cosines + d, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + d, mask=turns, other=0.0).to(tl.float32)
    return rounded(rounded(own * cosine, head) + rounded(other * sine, head), head)


@triton.jit(do_not_specialize=["slots"])  # a table's slots may begin anywhere in the slots of all tables
def rotate(
    qkv,
    query_norm,
    key_norm,
    value_norm,
    cosines,
    sines,
    query,
    keys,
    key_scales,
    values,
    value_scales,
    positions,
    slots,
    keys_block,
    keys_token,
    keys_head,
    values_block,
    values_token,
    values_head,
    epsilon,
    KIND: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    GATED: tl.constexpr,
    SIDES: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Grid: (rows, heads). Write a query to `query`, or a key or value to the pool; padding rows write no KV.
    With `GATED` 1 an output gate follows each query in `qkv`. With one of SIDES values are made of the keys.
    `write` explains the strides.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED)
    inside = d < DIM
    part = head
    if GATED:
        part += tl.minimum(head, HEADS)
    if SIDES == 1:
        part = tl.where(head < HEADS + KV_HEADS, part, part - KV_HEADS)
    own = qkv + (row * (HEADS * (1 + GATED) + SIDES * KV_HEADS) + part) * DIM
    angle = tl.load(positions + row) * ROTATED
    if ROTATED > 0:
        cosines += angle
        sines += angle
    if head < HEADS:
        turned = _turned(own, query_norm, cosines, sines, epsilon, KIND, DIM, PADDED, ROTATED)
        tl.store(query + (row * HEADS + head) * DIM + d, turned.to(query.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block, token = slot // PAGE, slot % PAGE
    if head < HEADS + KV_HEADS:
        turned = _turned(own, key_norm, cosines, sines, epsilon, KIND, DIM, PADDED, ROTATED)
        place = block * keys_block + token * keys_token + (head - HEADS) * keys_head
        key_scale = None
        if key_scales is not None:
            key_scale = scale_at(key_scales, block, token, head - HEADS, keys_block, keys_token)
        store_row(turned, keys + place, key_scale, DIM, PADDED, FP8)
    else:
        value = _turned(own, value_norm, cosines, sines, epsilon, KIND, DIM, PADDED, 0)
        place = block * values_block + token * values_token + (head - HEADS - KV_HEADS) * values_head
        value_scale = None
        if value_scales is not None:
            kv_head = head - HEADS - KV_HEADS
            value_scale = scale_at(value_scales, block, token, kv_head, values_block, values_token)
        store_row(value, values + place, value_scale, DIM, PADDED, FP8)


@triton.jit
def open_heads(attended, queries, queries_row, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Grid: (rows * HEADS). Multiply what a head attended to by the sigmoid of the gate after its query."""
    number, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = i < SIZE
    gate_place = number // HEADS * queries_row + (number % HEADS * 2 + 1) * SIZE + i
    gates = tl.load(queries + gate_place, mask=inside, other=0.0).to(tl.float32)
    opening = rounded(1.0 / (1.0 + tl.exp(-gates)), attended)
    values = tl.load(attended + number * SIZE + i, mask=inside, other=0.0).to(tl.float32) * opening
    tl.store(attended + number * SIZE + i, values.to(attended.dtype.element_ty), mask=inside)


@triton.jit
def activated(gates, ACTIVATION: tl.constexpr):
    """Apply SiLU or GELU to float32 values."""
    exponents = gates
    if ACTIVATION == _GELU_TANH:
        exponents = 1.5957691216 * (gates + 0.044715 * gates * gates * gates)
    return gates / (1.0 + tl.exp(-exponents))


@triton.jit
def clamped_swiglu(gates, values, like):
    """Apply gpt-oss's gates to float32 values, rounded as `like`."""
    gates = tl.minimum(gates, _LIMIT)
    values = tl.minimum(tl.maximum(values, -_LIMIT), _LIMIT)
    opening = rounded(1.0 / (1.0 + tl.exp(-rounded(gates * _SLOPE, like))), like)
    return rounded(values + 1.0, like) * rounded(gates * opening, like)


@triton.jit
def gate(gate_up, out, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Activate the first half of a row, by SiLU or GELU, and multiply it by the second."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gates = tl.load(gate_up + row * 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    product = rounded(activated(gates, ACTIVATION), out) * ups
    tl.store(out + row * SIZE + i, product.to(out.dtype.element_ty), mask=inside)
