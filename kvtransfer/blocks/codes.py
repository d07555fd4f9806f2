"""int8 codes of KV in host memory: packed and unpacked in one compiled pass over the values."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import SegmentLayout
from native.build import load_library, optional

logger = logging.getLogger("tandem.kvtransfer")

_DTYPES = (torch.float32, torch.bfloat16)


@optional(logger, "KV is converted to and from int8 by torch, which is slower")
def _library() -> ctypes.CDLL:
    return load_library(Path(__file__).parent / "codes.cpp")


def compiled(pool: SegmentLayout, wire: SegmentLayout, device: torch.device) -> bool:
    """Return whether these functions convert between such a pool and such a wire."""
    known = pool.dtype in _DTYPES and wire.quantized and wire.code_dtype == torch.int8
    return known and device.type == "cpu" and _library() is not None


def pack(
    pool: Tensor,
    out: Tensor,
    ours: SegmentLayout,
    wire: SegmentLayout,
    blocks: BlockIndices,
    num_tokens: BlockIndices,
    limits: tuple[float, float],
) -> tuple[int, int, int] | None:
    """Pack a segment of the pool's `blocks` into the first blocks of `out`; both are uint8 [n, block_bytes].

    A group (row, plane, head) whose largest magnitude is below `limits[0]` is packed as zeros. Return the
    first group that exceeds `limits[1]`, or None.
    """
    library = _library()
    assert library is not None
    block_size, heads, width = ours.tokens_shape
    blocks, num_tokens = np.ascontiguousarray(blocks), np.ascontiguousarray(num_tokens)
    bad = library.tandem_pack(
        ours.dtype.itemsize,
        out.data_ptr() + wire.start,
        out.stride(0),
        wire.values_bytes,
        pool.data_ptr() + ours.start,
        pool.stride(0),
        blocks.ctypes.data,
        num_tokens.ctypes.data,
        len(blocks),
        ours.planes,
        block_size,
        heads,
        width,
        *limits,
    )
    if bad < 0:
        return None
    return bad // heads // ours.planes, bad // heads % ours.planes, bad % heads


def unpack(
    staged: Tensor,
    pool: Tensor,
    wire: SegmentLayout,
    ours: SegmentLayout,
    sources: BlockIndices,
    targets: BlockIndices,
    count: int,
) -> None:
    """Unpack the first `count` tokens of the staged `sources`, one segment, into the pool's `targets`."""
    library = _library()
    assert library is not None
    block_size, heads, width = wire.tokens_shape
    sources, targets = np.ascontiguousarray(sources), np.ascontiguousarray(targets)
    library.tandem_unpack(
        ours.dtype.itemsize,
        pool.data_ptr() + ours.start,
        pool.stride(0),
        targets.ctypes.data,
        staged.data_ptr() + wire.start,
        staged.stride(0),
        sources.ctypes.data,
        wire.values_bytes,
        len(sources),
        count,
        wire.planes,
        block_size,
        heads,
        width,
    )
