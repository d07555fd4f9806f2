"""Conversion of blocks between a pool's values and the wire's: quantization, dequantization and casts.

On a quantized wire a value is one byte, with a scale for each (block, layer, plane, kv head). Symmetric: the
scale is the largest magnitude of its group over the largest code (127 for int8, 448 for fp8), so nothing is
clipped and zero stays zero. Only a block's valid tokens count. The slots after them are packed as zeros:
values of the block's earlier owner must neither enlarge a scale nor leave the worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.blocks import codes
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import (
    SCALE_DTYPE,
    BlockLayout,
    JoinedBlocks,
    LayoutError,
    SegmentLayout,
    conversion_problem,
    tokens_in_blocks,
    wire_segments,
)
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo

CHUNK_VALUES = 1024 * 1024
"""Values in a chunk: 4 MiB of float32, which fit in a shared cache and are many enough for a torch call."""


class Scratch:
    """Named buffers that grow when a larger one is requested. For one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor, valid until the same name is requested again."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buffer[:nbytes].view(dtype).view(shape)


def scale_by(values: Tensor, factors: Tensor) -> Tensor:
    """Multiply [..., kv_heads, head_dim] in place by factors [..., kv_heads, 1].

    Expanding the factors over head_dim first makes all heads one inner loop: up to three times as fast.
    """
    return values.mul_(factors.expand(*factors.shape[:-1], values.shape[-1]).contiguous())


def chunks(blocks: int, planes: int, plane_values: int) -> Iterator[tuple[slice, slice]]:
    """Cut [blocks, planes, plane_values] into (blocks, planes) ranges: several blocks, or a part of one."""
    block_values = planes * plane_values
    if block_values <= CHUNK_VALUES:
        step = CHUNK_VALUES // block_values
        for start in range(0, blocks, step):
            yield slice(start, min(start + step, blocks)), slice(0, planes)
    else:
        step = max(1, CHUNK_VALUES // plane_values)
        for block in range(blocks):
            for start in range(0, planes, step):
                yield slice(block, block + 1), slice(start, min(start + step, planes))


CPU = torch.device("cpu")
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST, LARGEST = 1e-30, 1e38
"""Groups with a largest magnitude below `SMALLEST` are packed as zeros, and above `LARGEST` refused. Between
the two, scales and their inverses are normal float32 numbers.
"""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class NonFiniteError(TandemError):
    """A block holds NaN, an infinity or a value beyond `LARGEST`, and can't be quantized."""


class Quantizer:
    """A converter of pool blocks of these segments to blocks of `wire` segments, on the pool's device. For
    one thread at a time.

    `wire_dtype` is "int8" or "fp8". Raises LayoutError for segments that can't be quantized.
    """

    def __init__(self, segments: Sequence[SegmentInfo], wire_dtype: str, device: torch.device = CPU) -> None:
        self.wire = wire_segments(segments, wire_dtype)
        self._pool_layout = BlockLayout(segments)
        self._wire_layout = BlockLayout(self.wire)
        self._device = device
        self._scratch = Scratch(device)

    @property
    def wire_block_bytes(self) -> int:
        return self._wire_layout.block_bytes

    def pack(
        self,
        pool: memoryview | Tensor | JoinedBlocks,
        blocks: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        out: memoryview | Tensor,
    ) -> None:
        """Write the pool's `blocks`, in this order, to the start of `out`: writable buffers, or blocks.
        Blocks divided among devices are joined first, and errors then number them from 0.

        `num_tokens` (same length) is the number of valid leading tokens of each block. The blocks exist and
        fit into `out`. Raises NonFiniteError.
        """
        if isinstance(pool, JoinedBlocks):
            pool, blocks = pool[torch.from_numpy(blocks)], np.arange(len(blocks))
        source, target = self._pool_layout.blocks(pool), self._wire_layout.blocks(out)
        for ours, wire in zip(self._pool_layout.segments, self._wire_layout.segments, strict=True):
            if codes.compiled(ours, wire, self._device):
                bad = codes.pack(source, target, ours, wire, blocks, num_tokens, (SMALLEST, LARGEST))
                if bad is not None:
                    raise _not_finite(wire, blocks[bad[0]], *bad[1:])
            else:
                self._pack_by_torch(source, target, ours, wire, blocks, num_tokens)

    def _pack_by_torch(
        self,
        source: Tensor,
        target: Tensor,
        ours: SegmentLayout,
        wire: SegmentLayout,
        blocks: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
    ) -> None:
        values, codes, scales = ours.values(source), wire.values(target), wire.scales(target)
        block_size, heads, head_dim = ours.tokens_shape
        for rows, planes in chunks(len(blocks), ours.planes, block_size * heads * head_dim):
            chunk = self._gather(values[:, planes], blocks[rows], num_tokens[rows])
            top = self._largest(chunk)
            _check(top, wire, blocks[rows], planes)
            inverse = _scale(top, LARGEST_CODE[wire.code_dtype], out=scales[rows, planes])
            self._encode(chunk, inverse, out=codes[rows, planes])

    def _gather(
        self, values: Tensor, blocks: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> Tensor:
        """Copy blocks of [num_blocks, planes, block_size, ...], with zeros after the valid tokens."""
        chunk = self._scratch.take("chunk", (len(blocks), *values.shape[1:]), values.dtype)
        torch.index_select(values, 0, torch.from_numpy(blocks).to(self._device), out=chunk)
        for row in np.flatnonzero(num_tokens < values.shape[2]).tolist():
            chunk[row, :, num_tokens[row] :] = 0
        return chunk

    def _largest(self, chunk: Tensor) -> Tensor:
        """Return the largest magnitude of each (block, plane, head), as float32; not finite if any value is
        not.

        Floating point numbers without their sign bits compare like the integers with the same bits.
        """
        bits = chunk.view(_BITS[chunk.dtype])
        magnitude = self._scratch.take("float", tuple(chunk.shape), bits.dtype)
        torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=magnitude)
        top = magnitude.amax(2, keepdim=True).amax(4, keepdim=True)
        return top.view(chunk.dtype).float()

    def _encode(self, chunk: Tensor, inverse: Tensor, out: Tensor) -> None:
        scaled = self._scratch.take("float", tuple(chunk.shape), torch.float32)
        scale_by(scaled.copy_(chunk), inverse)
        if out.dtype == torch.int8:
            scaled.round_()
        out.copy_(scaled)


def _scale(top: Tensor, largest_code: float, out: Tensor) -> Tensor:
    """Write the scales to `out`; return their inverses."""
    scale = (top / largest_code).to(SCALE_DTYPE)
    scale[top < SMALLEST] = 0
    out.copy_(scale)
    inverse = scale.float().reciprocal()
    inverse[top < SMALLEST] = 0
    return inverse


def _check(top: Tensor, wire: SegmentLayout, blocks: npt.NDArray[np.int64], planes: slice) -> None:
    bad = ~(top <= LARGEST)
    if bad.any():
        row, plane, _, head, _ = bad.nonzero()[0].tolist()
        raise _not_finite(wire, blocks[row], planes.start + plane, head)


def _not_finite(wire: SegmentLayout, block: int, plane: int, head: int) -> NonFiniteError:
    per_layer = wire.info.shape[1]
    layer, which = divmod(plane, per_layer)
    kind = "KV"[which] if per_layer == 2 else f"plane {which}"
    return NonFiniteError(
        f"block {block}, segment {wire.info.name}, layer {layer}, {kind}, head {head}: "
        f"a value is not finite or is beyond {LARGEST:g}, and can't be quantized"
    )


HALF_PER_FP8 = 2.0**8
_EXTENDED_SIGN = 0x4000


class RangeError(TandemError):
    """A value doesn't fit our pool's dtype."""


class Converter:
    """A converter of wire blocks to blocks of `pool` (segments `ours`) on its device. For one thread at a
    time.

    `pool` is in host memory, or uint8 [num_blocks, block_bytes] on a device, or divided among devices. Raises
    LayoutError for segments that can't be converted.
    """

    def __init__(
        self,
        wire: Sequence[SegmentInfo],
        ours: Sequence[SegmentInfo],
        pool: memoryview | Tensor | JoinedBlocks,
    ) -> None:
        problem = conversion_problem(wire, ours)
        if problem is not None:
            raise LayoutError(*problem)
        self._wire = BlockLayout(wire)
        if isinstance(pool, JoinedBlocks):
            self._parts = [
                _PartConverter(wire, part.segments, part.blocks, part.heads) for part in pool.parts
            ]
        else:
            self._parts = [_PartConverter(wire, ours, BlockLayout(ours).blocks(pool), {})]

    def place(
        self, staged: memoryview, positions: BlockIndices, block_ids: BlockIndices, num_tokens: int
    ) -> None:
        """Write the wire blocks at the start of `staged` to the pool, up to the prompt's `num_tokens` tokens.

        Wire block i is the prompt's block `positions[i]`; `block_ids` are our blocks of the prompt, in order.
        Nothing else in the pool is changed. `staged` must be writable; its lease checked the positions and
        blocks. Raises RangeError for a value beyond the range of a float16 pool.
        """
        blocks = self._wire.blocks(staged)[: len(positions)]
        for part in self._parts:
            part.place(blocks, positions, block_ids, num_tokens)


_ALL = slice(None)


class _PartConverter:
    """A converter for one device's part: it has `heads` of each segment by name, or all without an entry."""

    def __init__(
        self,
        wire: Sequence[SegmentInfo],
        ours: Sequence[SegmentInfo],
        pool: Tensor,
        heads: Mapping[str, slice],
    ) -> None:
        wired = {segment.info.name: segment for segment in BlockLayout(wire).segments}
        self._ours = BlockLayout(ours)
        self._segments = [(wired[each.info.name], each) for each in self._ours.segments]
        self._pool, self._heads = pool, heads
        self._scratch = Scratch(pool.device)

    def place(
        self, blocks: Tensor, positions: BlockIndices, block_ids: BlockIndices, num_tokens: int
    ) -> None:
        blocks = blocks.to(self._pool.device)
        counts = tokens_in_blocks(positions, self._ours.block_size, num_tokens)
        for count in np.unique(counts[counts > 0]).tolist():
            rows = np.flatnonzero(counts == count)
            targets = block_ids[positions[rows]]
            for wire, ours in self._segments:
                if not self._heads and codes.compiled(ours, wire, self._pool.device):
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
        heads = self._heads.get(ours.info.name, _ALL)
        values, target = wire.values(blocks)[:, :, :count, heads], ours.values(self._pool)[:, :, :count]
        _, num_heads, width = ours.tokens_shape
        for rows, planes in chunks(len(sources), wire.planes, count * num_heads * width):
            index = sources[rows]
            chunk = _select(values[:, planes], index)
            if ours.in_rows:
                scales = _select(wire.scales(blocks)[:, planes, :count, heads], index)
                _write(target[:, planes], targets[rows], chunk)
                _write(ours.scales(self._pool)[:, planes, :count], targets[rows], scales)
                continue
            if wire.quantized:
                chunk = self._dequantize(chunk, _select(wire.scales(blocks)[:, planes, :, heads], index))
            _write(target[:, planes], targets[rows], self._cast(chunk, ours.dtype))

    def _dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        decoded = self._scratch.take("decoded", tuple(codes.shape), torch.float32)
        if codes.dtype == torch.float8_e4m3fn:
            return scale_by(decoded.copy_(self._halves(codes)), scales * HALF_PER_FP8)
        return scale_by(decoded.copy_(codes), scales)

    def _halves(self, codes: Tensor) -> Tensor:
        """Reinterpret fp8 codes as float16 numbers, which are smaller by the factor `HALF_PER_FP8`.

        Sign, exponent and mantissa keep their bits. The factor comes from the exponents' biases (7 and 15).
        torch converts float16 fifty times as fast as fp8.
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
    """Return these blocks, as a view if they are consecutive, as staged blocks mostly are."""
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
