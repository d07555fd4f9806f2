"""Packs KV blocks for the wire: one byte a value, with a scale for each (block, layer, plane, kv head).

Symmetric: the scale is the largest magnitude of its group over the largest code (127 for int8, 448 for fp8),
so nothing is clipped and zero stays zero. Only a block's valid tokens count. The slots after them are packed
as zeros, so that values of an earlier owner neither enlarge a scale nor leave the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.blocks import codes as int8_codes
from kvtransfer.blocks.layout import SCALE_DTYPE, BlockLayout, SegmentLayout, wire_segments
from kvtransfer.blocks.scratch import Scratch, chunks, scale_by
from protocol.errors import TandemError
from protocol.handoff import SegmentInfo

CPU = torch.device("cpu")
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST, LARGEST = 1e-30, 1e38
"""Groups whose largest magnitude is below `SMALLEST` are packed as zeros, beyond `LARGEST` they are refused:
between them scales and their inverses are ordinary float32 numbers."""

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class NonFiniteError(TandemError):
    """A block holds NaN, an infinity or a value beyond `LARGEST`, and can't be quantized."""


class Quantizer:
    """Packs blocks of a pool of these segments as blocks of `wire` segments, on the pool's device. For one
    thread at a time.

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
        pool: memoryview | Tensor,
        blocks: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        out: memoryview | Tensor,
    ) -> None:
        """Write the pool's `blocks`, in this order, to the start of `out`: writable buffers, or blocks.

        `num_tokens` (same length) is the number of valid leading tokens of each block. Raises
        NonFiniteError, and ValueError for blocks that the pool does not have, or more of them than fit into
        `out`.
        """
        source, target = self._pool_layout.blocks(pool), self._wire_layout.blocks(out)
        if len(blocks) > len(target):
            raise ValueError(f"out has room for {len(target)} blocks, not {len(blocks)}")
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < len(source):
            raise ValueError(f"blocks must be in [0, {len(source)})")
        for ours, wire in zip(self._pool_layout.segments, self._wire_layout.segments, strict=True):
            if int8_codes.compiled(ours, wire, self._device):
                bad = int8_codes.pack(source, target, ours, wire, blocks, num_tokens, (SMALLEST, LARGEST))
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
        """Copy blocks of [pool blocks, planes, block_size, ...], with zeros after their tokens."""
        chunk = self._scratch.take("chunk", (len(blocks), *values.shape[1:]), values.dtype)
        torch.index_select(values, 0, torch.from_numpy(blocks).to(self._device), out=chunk)
        for row in np.flatnonzero(num_tokens < values.shape[2]).tolist():
            chunk[row, :, num_tokens[row] :] = 0
        return chunk

    def _largest(self, chunk: Tensor) -> Tensor:
        """Return the largest magnitude of each (block, plane, head), as float32; not finite if any of them
        is not.

        Without its sign bit a floating point number orders like the integer of the same bits.
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
