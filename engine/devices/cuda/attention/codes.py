"""Coded rows (`engine.kv.row_codes`): one byte per value and a float32 scale. Plain bit arithmetic gives the
same bytes on every device, with or without FP8 units.
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
