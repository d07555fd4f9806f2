"""Converts blocks of another layout into our pool: dequantizes, casts, and re-blocks.

Tokens go from (wire block, slot) to (our block, slot). The overlap of a wire block with one of ours is a run
of slots; overlaps of one kind (from the same slot, to the same slot, of equal length) are moved together.
Block sizes of which one divides the other make few kinds, and even the worst make no more copies than there
are overlaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.blocks import codes
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import BlockLayout, LayoutError, SegmentLayout, conversion_problem
from kvtransfer.blocks.scratch import Scratch, chunks, scale_by
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo

HALF_PER_FP8 = 2.0**8
_EXTENDED_SIGN = 0x4000


class RangeError(TandemError):
    """A value doesn't fit our pool's dtype."""


@dataclass(frozen=True)
class Move:
    """`count` tokens from slot `source_slot` of each wire block to slot `target_slot` of each of ours."""

    wire_blocks: BlockIndices
    our_blocks: BlockIndices
    source_slot: int
    target_slot: int
    count: int


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
        self,
        staged: memoryview,
        positions: BlockIndices,
        block_ids: BlockIndices,
        first_token: int,
        num_tokens: int,
    ) -> None:
        """Write the tokens in [first_token, num_tokens) of the wire blocks at the start of `staged`.

        Wire block i is the prompt's block `positions[i]`, counted in wire blocks; `block_ids` are our blocks
        of the prompt, in order. Nothing else in the pool is changed. `staged` must be writable. Raises
        ValueError for blocks that do not exist, RangeError for a value beyond the range of a float16 pool.
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
        sizes = self._wire.block_size, self._ours.block_size
        for move in moves(positions, block_ids, sizes, first_token, num_tokens):
            for wire, ours in zip(self._wire.segments, self._ours.segments, strict=True):
                if codes.compiled(ours, wire, self._pool.device):
                    where = move.source_slot, move.target_slot, move.count
                    codes.unpack(blocks, self._pool, wire, ours, move.wire_blocks, move.our_blocks, *where)
                else:
                    self._move(move, wire, ours, blocks)

    def _move(self, move: Move, wire: SegmentLayout, ours: SegmentLayout, blocks: Tensor) -> None:
        def of_wire(tokens: Tensor) -> Tensor:
            return tokens.narrow(2, move.source_slot, move.count)

        def of_pool(tokens: Tensor) -> Tensor:
            return tokens.narrow(2, move.target_slot, move.count)

        values, target = of_wire(wire.values(blocks)), of_pool(ours.values(self._pool))
        _, heads, width = wire.tokens_shape
        for rows, planes in chunks(len(move.wire_blocks), wire.planes, move.count * heads * width):
            index = move.wire_blocks[rows]
            chunk = _select(values[:, planes], index)
            if ours.in_rows:
                scales = _select(of_wire(wire.scales(blocks))[:, planes], index)
                _write(target[:, planes], move.our_blocks[rows], chunk)
                _write(of_pool(ours.scales(self._pool))[:, planes], move.our_blocks[rows], scales)
                continue
            if wire.quantized:
                chunk = self._dequantize(chunk, _select(wire.scales(blocks)[:, planes], index))
            _write(target[:, planes], move.our_blocks[rows], self._cast(chunk, ours.dtype))

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


def moves(
    positions: BlockIndices,
    block_ids: BlockIndices,
    block_sizes: tuple[int, int],
    first_token: int,
    num_tokens: int,
) -> Iterator[Move]:
    """Yield the tokens in [first_token, num_tokens) of the wire blocks, by kind; `block_sizes` are (wire,
    ours).
    """
    wire_size, our_size = block_sizes
    starts = np.maximum(positions * wire_size, first_token)
    ends = np.minimum((positions + 1) * wire_size, num_tokens)
    rows = np.flatnonzero(starts < ends)
    if not len(rows):
        return
    first, last = starts[rows] // our_size, (ends[rows] - 1) // our_size
    lengths = last - first + 1
    rows = np.repeat(rows, lengths)
    before = np.cumsum(lengths) - lengths
    blocks = np.repeat(first - before, lengths) + np.arange(len(rows))
    start = np.maximum(starts[rows], blocks * our_size)
    count = np.minimum(ends[rows], (blocks + 1) * our_size) - start
    kinds = np.stack((start - positions[rows] * wire_size, start - blocks * our_size, count), axis=1)
    unique, kind_of = np.unique(kinds, axis=0, return_inverse=True)
    order = np.argsort(kind_of.reshape(-1), kind="stable")
    bounds = np.cumsum(np.bincount(kind_of.reshape(-1)))[:-1]
    for kind, members in zip(unique.tolist(), np.split(order, bounds), strict=True):
        yield Move(rows[members], block_ids[blocks[members]], *kind)


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
