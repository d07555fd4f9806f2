"""Whole blocks of a pool that is divided by KV heads among the devices of a worker's ranks.

A part of a block has all layers and tokens, but only some heads. Peers see whole blocks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvtransfer.blocks.layout import BlockLayout, SegmentLayout
from protocol.handoff import SegmentInfo


class PoolPart(Protocol):
    """One device's part of the blocks, uint8 [num_blocks, part_bytes], with its `heads` of each segment, by
    name.
    """

    blocks: Tensor
    segments: tuple[SegmentInfo, ...]
    heads: dict[str, slice]


class JoinedBlocks:
    """A stand-in for a tensor of whole blocks, uint8 [num_blocks, block_bytes]. Parts may share heads."""

    dtype = torch.uint8

    def __init__(self, segments: Sequence[SegmentInfo], parts: Sequence[PoolPart]) -> None:
        self.parts = parts
        self._layout = BlockLayout(segments)
        self._parts = [(part, BlockLayout(part.segments)) for part in parts]
        self.shape = torch.Size((len(parts[0].blocks), self._layout.block_bytes))
        self.device = parts[0].blocks.device
        """The device on which blocks are joined."""

    def __getitem__(self, chosen: slice | Tensor) -> Tensor:
        """Join consecutive blocks, or those with these numbers: uint8 [n, block_bytes]."""
        count = len(chosen) if isinstance(chosen, Tensor) else len(range(*chosen.indices(self.shape[0])))
        whole = torch.empty((count, self.shape[1]), dtype=torch.uint8, device=self.device)
        segments = {segment.info.name: segment for segment in self._layout.segments}
        for part, layout in self._parts:
            for own in layout.segments:
                heads = part.heads[own.info.name]
                pairs = zip(
                    _tensors(segments[own.info.name], whole), _tensors(own, part.blocks[chosen]), strict=True
                )
                for target, source in pairs:
                    target[..., heads, :].copy_(source, non_blocking=True)
        return whole


def _tensors(segment: SegmentLayout, blocks: Tensor) -> Iterator[Tensor]:
    """Yield a segment's values and its row scales, if any: [n, planes, block_size, heads, ...]."""
    yield segment.values(blocks)
    if segment.in_rows:
        yield segment.scales(blocks)
