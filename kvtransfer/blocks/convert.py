"""Converts blocks of another dtype, or quantized on the wire, into our pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtransfer.blocks import codes
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import (
    BlockLayout,
    LayoutError,
    SegmentLayout,
    conversion_problem,
    tokens_in_blocks,
)
from kvtransfer.blocks.scratch import Scratch, chunks, scale_by
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo

HALF_PER_FP8 = 2.0**8
_EXTENDED_SIGN = 0x4000


class RangeError(TandemError):
    """A value doesn't fit our pool's dtype."""


class Converter:
    """Places wire blocks in `pool`, whose blocks are `ours`, on its device. For one thread at a time.

    `pool` is in the host's memory, or uint8 [num_blocks, block_bytes] in a device's. Raises LayoutError for
    segments that can't be converted.
    """

    def __init__(
        self, wire: Sequence[SegmentInfo], ours: Sequence[SegmentInfo], pool: memoryview | Tensor
    ) -> None:
        problem = conversion_problem(wire, ours)
        if problem is not None:
            raise LayoutError(*problem)
        self._wire = BlockLayout(wire)
        self._ours = BlockLayout(ours)
        self._pool = self._ours.blocks(pool)
        self._scratch = Scratch(self._pool.device)

    @property
    def wire_block_bytes(self) -> int:
        return self._wire.block_bytes

    def place(
        self, staged: memoryview, positions: BlockIndices, block_ids: BlockIndices, num_tokens: int
    ) -> None:
        """Write the tokens before `num_tokens` of the wire blocks at the start of `staged`.

        Wire block i is the prompt's block `positions[i]`; `block_ids` are our blocks of the prompt, in order.
        Nothing else in the pool is changed. `staged` must be writable. Raises ValueError for blocks that do
        not exist, RangeError for a value beyond the range of a float16 pool.
        """
        blocks = self._wire.blocks(staged)
        if len(positions) > len(blocks):
            raise ValueError(f"staged holds {len(blocks)} blocks, not {len(positions)}")
        if num_tokens > len(block_ids) * self._ours.block_size:
            raise ValueError(f"{len(block_ids)} block_ids have no room for {num_tokens} tokens")
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < len(self._pool):
            raise ValueError(f"block_ids must be in [0, {len(self._pool)})")
        if len(positions) and positions.min() < 0:
            raise ValueError("positions must not be negative")
        blocks = blocks[: len(positions)].to(self._pool.device)
        counts = tokens_in_blocks(positions, self._ours.block_size, num_tokens)
        for count in np.unique(counts[counts > 0]).tolist():
            rows = np.flatnonzero(counts == count)
            targets = block_ids[positions[rows]]
            for wire, ours in zip(self._wire.segments, self._ours.segments, strict=True):
                if codes.compiled(ours, wire, self._pool.device):
                    codes.unpack(blocks, self._pool, wire, ours, rows, targets, count)
                else:
                    self._move(blocks, wire, ours, rows, targets, count)

    def _move(
        self,
        blocks: Tensor,
        wire: SegmentLayout,
        ours: SegmentLayout,
        sources: BlockIndices,
        targets: BlockIndices,
        count: int,
    ) -> None:
        """Write the first `count` tokens of the wire blocks `sources` to our blocks `targets`."""
        values, target = wire.values(blocks)[:, :, :count], ours.values(self._pool)[:, :, :count]
        _, heads, width = wire.tokens_shape
        for rows, planes in chunks(len(sources), wire.planes, count * heads * width):
            index = sources[rows]
            chunk = _select(values[:, planes], index)
            if ours.in_rows:
                scales = _select(wire.scales(blocks)[:, planes, :count], index)
                _write(target[:, planes], targets[rows], chunk)
                _write(ours.scales(self._pool)[:, planes, :count], targets[rows], scales)
                continue
            if wire.quantized:
                chunk = self._dequantize(chunk, _select(wire.scales(blocks)[:, planes], index))
            _write(target[:, planes], targets[rows], self._cast(chunk, ours.dtype))

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        decoded = self._scratch.take("decoded", tuple(codes.shape), torch.float32)
        if codes.dtype == torch.float8_e4m3fn:
            return scale_by(decoded.copy_(self._halves(codes)), scales * HALF_PER_FP8)
        return scale_by(decoded.copy_(codes), scales)

    def _halves(self, codes: Tensor) -> Tensor:
        """Reinterpret fp8 codes as float16 numbers that are smaller by `HALF_PER_FP8`: the same bits,
        shifted by three places.

        torch converts float16 fifty times as fast, and the mantissa's and the exponent's bits fit exactly;
        the factor is the difference of the exponents' biases (7 and 15).
        """
        bits = self._scratch.take("halves", tuple(codes.shape), torch.int16)
        bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~_EXTENDED_SIGN)
        return bits.view(torch.float16)

    def _cast(self, chunk: Tensor, dtype: torch.dtype) -> Tensor:
        if chunk.dtype == dtype:
            return chunk
        cast = self._scratch.take("cast", tuple(chunk.shape), dtype).copy_(chunk)
        if dtype == torch.float16 and not cast.isfinite().all():
            raise RangeError(f"a value of the sender's KV is beyond float16, {torch.finfo(dtype).max:g}")
        return cast


def _select(blocks: Tensor, index: BlockIndices) -> Tensor:
    """Return these blocks: a view if they are consecutive, as staged ones mostly are."""
    if _consecutive(index):
        return blocks[index[0] : index[0] + len(index)]
    return blocks.index_select(0, torch.from_numpy(index).to(blocks.device))


def _write(blocks: Tensor, index: BlockIndices, values: Tensor) -> None:
    if _consecutive(index):
        blocks[index[0] : index[0] + len(index)].copy_(values)
    elif blocks.device.type != "cpu":
        blocks.index_copy_(0, torch.from_numpy(index).to(blocks.device), values)
    else:  # numpy copies rows of bytes, which is twice as fast as torch's index_copy_ of elements
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[blocks.dtype.itemsize]
        blocks.view(bits).numpy()[index] = values.view(bits).numpy()


def _consecutive(index: BlockIndices) -> bool:
    return bool(index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all())
