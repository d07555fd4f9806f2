"""The kernel that writes a step's keys and values to the pool, and zeros to padding rows' results; and coded
rows (`engine.kv.row_codes`), a byte per value and a float32 scale: plain bit arithmetic gives the same bytes
on every device, with or without FP8 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(1e-30)


@triton.jit
def decode(codes, FP8: tl.constexpr):
    """Decode bytes [...] to float16 exactly, except that E4M3 values come out divided by 256."""
    if FP8:  # an exponent biased by 7 becomes one biased by 15
        bits = codes.to(tl.uint16)
        values = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        values = codes.to(tl.int8, bitcast=True).to(tl.float16)
    return values


@triton.jit
def encode(values, FP8: tl.constexpr):
    """Return the bytes and the scale of a row of float32 values."""
    largest: tl.constexpr = 448.0 if FP8 else 127.0
    top = tl.max(tl.abs(values), 0)
    finite = tl.sum((tl.abs(values) < float("inf")).to(tl.int32), 0) == values.shape[0]
    zero = top < SMALLEST
    inverse = tl.where(zero, 0.0, tl.div_rn(largest, tl.where(zero, 1.0, top)))
    scale = tl.where(finite, tl.where(zero, 0.0, tl.div_rn(top, largest)), float("nan"))
    scaled = tl.where(finite, values * inverse, 0.0)
    if FP8:
        codes = _to_e4m3(scaled)
    else:
        magic: tl.constexpr = 12582912.0  # 1.5 * 2**23: rounds halves to even
        codes = ((scaled + magic) - magic).to(tl.int8).to(tl.uint8, bitcast=True)
    return codes, scale


@triton.jit
def _to_e4m3(values):
    """Round to E4M3, halves to even. Magnitudes are at most 448 plus rounding."""
    bits = tl.abs(values).to(tl.uint32, bitcast=True)
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # Below 2**-6 the steps are 2**-9, the last bit of a float near 2**14.
    small = (tl.abs(values) + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    magnitude = tl.where(bits < (121 << 23), small, normal)
    sign = (values.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (magnitude | sign).to(tl.uint8)


@triton.jit
def scale_at(scales, block, token, head, block_bytes, token_bytes):
    """Return the address of a row's scale among `scales` [blocks, tokens, heads]."""
    return scales + block * (block_bytes // 4) + token * (token_bytes // 4) + head


@triton.jit
def store_row(values, place, scale_place, DIM: tl.constexpr, PADDED: tl.constexpr, FP8: tl.constexpr):
    """Store a head's key or value [PADDED] in the pool's format; `scale_place` is None if it is not coded."""
    d = tl.arange(0, PADDED)
    if scale_place is None:
        tl.store(place + d, values.to(place.dtype.element_ty), mask=d < DIM)
    else:
        codes, scale = encode(values.to(tl.float32), FP8)
        tl.store(place + d, codes, mask=d < DIM)
        tl.store(scale_place, scale)


@triton.jit(do_not_specialize=["slots"])  # they may begin anywhere in the slots of all tables
def write(
    key,
    value,
    keys,
    key_scales,
    values,
    value_scales,
    out,
    slots,
    key_row,
    key_head,
    value_row,
    value_head,
    keys_block,
    keys_token,
    keys_head,
    values_block,
    values_token,
    values_head,
    LAYER: tl.constexpr,
):
    """Grid: (rows, KV heads). Write a key and a value. Strides are in elements, for codes in bytes."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        d = tl.arange(0, LAYER.value_padded)
        for member in range(LAYER.group):
            place = out + (row * LAYER.heads + head * LAYER.group + member) * LAYER.value_dim
            tl.store(place + d, 0.0, mask=d < LAYER.value_dim)
        return
    block, token = slot // LAYER.page, slot % LAYER.page
    key_place = block * keys_block + token * keys_token + head * keys_head
    value_place = block * values_block + token * values_token + head * values_head
    key_scale, value_scale = None, None
    if key_scales is not None:
        key_scale = scale_at(key_scales, block, token, head, keys_block, keys_token)
        value_scale = scale_at(value_scales, block, token, head, values_block, values_token)
    d = tl.arange(0, LAYER.key_padded)
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=d < LAYER.key_dim, other=0.0)
    store_row(new_key, keys + key_place, key_scale, LAYER.key_dim, LAYER.key_padded, LAYER.fp8)
    if not LAYER.values_in_keys:
        d = tl.arange(0, LAYER.value_padded)
        new_value = tl.load(
            value + row * value_row + head * value_head + d, mask=d < LAYER.value_dim, other=0.0
        )
        store_row(
            new_value, values + value_place, value_scale, LAYER.value_dim, LAYER.value_padded, LAYER.fp8
        )
