"""What the decoder computes between matrix products. Values are rounded where Transformers' modules round."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.devices.cuda.attention.write import scale_at, store_row


@triton.jit
def _rounded(values, like):
    """To the dtype that `like` points to, in float32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def add_norm(added, residual, weight, out, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Of a row: adds `added` to `residual`, if it is there, and writes the sum, normalized, to `out`."""
    i = tl.arange(0, PADDED)
    inside = i < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + i
    values = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        values = _rounded(values + tl.load(added + place, mask=inside, other=0.0).to(tl.float32), residual)
        tl.store(residual + place, values.to(residual.dtype.element_ty), mask=inside)
    normed = _rounded(values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon), out)
    normed = normed * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turned(head, norm, cosines, sines, epsilon, DIM: tl.constexpr, PADDED: tl.constexpr):
    """A head's query or key, normalized if there is a `norm`, at the position of these cosines and sines."""
    d = tl.arange(0, PADDED)
    inside = d < DIM
    opposite = (d + DIM // 2) % DIM
    own = tl.load(head + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(head + opposite, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(own * own, 0) / DIM + epsilon)
        own_weight = tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + opposite, mask=inside, other=0.0).to(tl.float32)
        own = _rounded(_rounded(own * scale, head) * own_weight, head)
        other = _rounded(_rounded(other * scale, head) * other_weight, head)
    other = tl.where(d < DIM // 2, -other, other)
    cosine = tl.load(cosines + d, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + d, mask=inside, other=0.0).to(tl.float32)
    return _rounded(_rounded(own * cosine, head) + _rounded(other * sine, head), head)


@triton.jit
def rotate(
    qkv,
    query_norm,
    key_norm,
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Of a row (program 0) and a head (program 1): queries to `query`, then keys and values to the pool, but
    for padding rows. Strides are as those of `write`.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED)
    inside = d < DIM
    own = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    angle = tl.load(positions + row) * DIM
    if head < HEADS:
        turned = _turned(own, query_norm, cosines + angle, sines + angle, epsilon, DIM, PADDED)
        tl.store(query + (row * HEADS + head) * DIM + d, turned.to(query.dtype.element_ty), mask=inside)
        return
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block, token = slot // PAGE, slot % PAGE
    if head < HEADS + KV_HEADS:
        turned = _turned(own, key_norm, cosines + angle, sines + angle, epsilon, DIM, PADDED)
        place = block * keys_block + token * keys_token + (head - HEADS) * keys_head
        key_scale = None
        if key_scales is not None:
            key_scale = scale_at(key_scales, block, token, head - HEADS, keys_block, keys_token)
        store_row(turned, keys + place, key_scale, DIM, PADDED, FP8)
    else:
        value = tl.load(own + d, mask=inside, other=0.0).to(tl.float32)
        place = block * values_block + token * values_token + (head - HEADS - KV_HEADS) * values_head
        value_scale = None
        if value_scales is not None:
            kv_head = head - HEADS - KV_HEADS
            value_scale = scale_at(value_scales, block, token, kv_head, values_block, values_token)
        store_row(value, values + place, value_scale, DIM, PADDED, FP8)


@triton.jit
def gate(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """SiLU of the first half of a row, times the second."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < SIZE
    gates = tl.load(gate_up + row * 2 * SIZE + i, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=inside, other=0.0).to(tl.float32)
    product = _rounded(gates / (1.0 + tl.exp(-gates)), out) * ups
    tl.store(out + row * SIZE + i, product.to(out.dtype.element_ty), mask=inside)
