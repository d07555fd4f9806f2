"""Computes the contents of blocks at both ends of a transfer: plain bytes, or values in a layout."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from protocol.handoff import SegmentInfo

Layout = Literal["bytes", "bf16", "fp16"]
SEGMENTS: dict[Layout, tuple[SegmentInfo, ...]] = {
    "bytes": (),
    "bf16": (SegmentInfo(name="target", dtype="bfloat16", shape=(2, 2, 16, 2, 64)),),
    "fp16": (SegmentInfo(name="target", dtype="float16", shape=(2, 2, 16, 2, 64)),),
}
"""Layouts with blocks of 16 KiB each."""


def pushed(layout: Layout, seed: int, position: int, nbytes: int) -> bytes:
    """Return the block at a position of a prompt, as its sender has it."""
    if layout == "bytes":
        return np.random.default_rng((seed, position)).bytes(nbytes)
    return _values(seed, position).view(torch.uint8).numpy().tobytes()


def received(theirs: Layout, ours: Layout, seed: int, position: int, nbytes: int) -> bytes:
    """Return the block at a position of a prompt, as the receiver must get it."""
    if theirs == ours:
        return pushed(theirs, seed, position, nbytes)
    return _values(seed, position).half().view(torch.uint8).numpy().tobytes()


def _values(seed: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 4096 + position)
    return torch.randn(SEGMENTS["bf16"][0].shape, generator=generator).bfloat16()
