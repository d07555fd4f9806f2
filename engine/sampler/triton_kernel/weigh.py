"""The distributions that rows' tokens are drawn from."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import SPAN
from engine.sampler.triton_kernel.scan import likeliest


@triton.jit
def weigh(
    logits,
    tops,
    firsts,
    numbers,
    floors,
    totals,
    shares,
    stride,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Programs: tile, row. `shares`, float32 [rows, SIZE], gets the tokens' probabilities, by what `settle`
    has found; zeros where no token has a finite score.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top, best = likeliest(tops, firsts, row, TILES, PADDED)
    temperature = tl.load(numbers + row).to(tl.float32)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    share = ((tokens == best) & (best >= 0)).to(tl.float32)
    if (best >= 0) & (temperature > 0):
        value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value - top, temperature)
        floor = tl.maximum(tl.load(floors + row), -SPAN)
        share = tl.where(value >= floor, tl.exp(value), 0.0) * (1.0 / tl.load(totals + row)).to(tl.float32)
    tl.store(shares + row * SIZE + tokens, share, mask=inside)
