"""A plain second implementation of the block layout, as a reference for the fast one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.blocks.layout import CODE_DTYPES, DTYPES
from protocol.handoff import SegmentInfo


def segment(
    *shape: int, name: str = "target", dtype: str = "float32", quantization: str = "none", planes: int = 2
) -> SegmentInfo:
    """Describe a segment. `shape` is (layers, block_size, kv_heads, head_dim)."""
    layers, block_size, heads, head_dim = shape
    return SegmentInfo(
        name=name, dtype=dtype, shape=(layers, planes, block_size, heads, head_dim), quantization=quantization
    )


def segment_bytes(info: SegmentInfo) -> int:
    layers, two, block_size, heads, head_dim = info.shape
    if info.quantization == "none":
        return layers * two * block_size * heads * head_dim * DTYPES[info.dtype].itemsize
    return layers * two * block_size * heads * head_dim + layers * two * heads * 4


def plain_block_bytes(segments: Sequence[SegmentInfo]) -> int:
    return sum(segment_bytes(info) for info in segments)


def parts(block: bytearray | memoryview, segments: Sequence[SegmentInfo]) -> list[memoryview]:
    """Return the bytes of each segment of one block."""
    view, start, cut = memoryview(block), 0, []
    for info in segments:
        cut.append(view[start : start + segment_bytes(info)])
        start += segment_bytes(info)
    return cut


def read_token(part: memoryview, info: SegmentInfo, slot: int) -> Tensor:
    """Return one token of one segment of one block: float32 [layers, 2, kv_heads, head_dim]."""
    if info.quantization == "none":
        return torch.frombuffer(part, dtype=DTYPES[info.dtype]).view(info.shape)[:, :, slot].float()
    layers, two, _, heads, _ = info.shape
    num_values = int(np.prod(info.shape))
    codes = torch.frombuffer(part, dtype=CODE_DTYPES[info.quantization], count=num_values).view(info.shape)
    scales = torch.frombuffer(part, dtype=torch.float32, offset=num_values).view(layers, two, heads, 1)
    return codes[:, :, slot].float() * scales


def write_token(part: memoryview, info: SegmentInfo, slot: int, token: Tensor) -> None:
    values = torch.frombuffer(part, dtype=DTYPES[info.dtype]).view(info.shape)
    values[:, :, slot] = token.to(DTYPES[info.dtype])


def random_blocks(segments: Sequence[SegmentInfo], count: int, generator: torch.Generator) -> bytearray:
    """Return blocks of ordinary numbers. Quantized segments get finite codes and ordinary scales."""
    blocks = bytearray()
    for _ in range(count):
        for info in segments:
            blocks += _random_segment(info, generator)
    return blocks


def _random_segment(info: SegmentInfo, generator: torch.Generator) -> bytes:
    values = torch.randn(info.shape, generator=generator)
    if info.quantization == "none":
        return raw(values.to(DTYPES[info.dtype]))
    layers, two, _, heads, _ = info.shape
    codes = (values * 30).clamp(-127, 127).round().to(CODE_DTYPES[info.quantization])
    scales = torch.rand((layers, two, heads), generator=generator) + 0.1
    return raw(codes) + raw(scales)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
