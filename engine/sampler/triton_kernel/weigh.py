"""The distributions from which rows' tokens are drawn."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.sampler.triton_kernel.noise import SPAN


@triton.jit
def share_of(target, row, tokens, inside):
    """Return the float32 probabilities of a row's `tokens`, one or a block, from the scales of `settle_row`;
    zeros if no token has a finite score. `target` is the tuple of `Chosen`'s tokens, logits, numbers, scales
    and logits stride.
    """
    chosen, logits, numbers, scales, stride = target
    best = tl.load(chosen + row)
    temperature = tl.load(numbers + row).to(tl.float32)
    share = ((tokens == best) & (best >= 0)).to(tl.float32)
    if (best >= 0) & (temperature > 0):
        top = tl.load(scales + row * 3).to(tl.float32)
        floor = tl.maximum(tl.load(scales + row * 3 + 1).to(tl.float32), -SPAN)
        total = tl.load(scales + row * 3 + 2)
        value = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        value = tl.div_rn(value - top, temperature)
        share = tl.where(value >= floor, tl.exp(value), 0.0) * (1.0 / total).to(tl.float32)
    return share


@triton.jit
def weigh(chosen, logits, numbers, scales, shares, stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid: (tiles, rows). Write the tokens' probabilities to `shares`, float32 [rows, SIZE]."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    inside = tokens < SIZE
    share = share_of((chosen, logits, numbers, scales, stride), row, tokens, inside)
    tl.store(shares + row * SIZE + tokens, share, mask=inside)
