"""The layout of a KV block's bytes, in a pool and on the wire.

A block is its segments, one after the other. A segment holds values [layers, planes, block_size, kv_heads,
head_dim] of `dtype`; the planes are usually keys and values. If `quantization` is "int8" or "fp8" each value
takes one byte instead, and the scales follow the values: [layers, planes, kv_heads] float32, one for all
tokens of the block and head. A value is its code times its scale. Little-endian, no padding; fp8 is OCP's
E4M3 without infinities (`torch.float8_e4m3fn`).

A pool may itself be quantized: "int8_row_scales" and "fp8_row_scales" have a scale for each token and head
(`engine.kv.row_codes`): [kv_heads] float32 after the codes of each token's plane. Such blocks are sent
unchanged, and only to pools of the same quantization.

Scales of finer groups were measured on the bundled model: one for each token and head makes the error smaller
by a quarter, one for each channel of K by half, and neither makes more of its greedy continuations agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.handoff import PAGED, ROW_QUANTIZATIONS, STATE, WINDOWED, SegmentInfo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CACHE_DTYPES = {name: flag for flag, name in ROW_QUANTIZATIONS.items()}
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SCALE_DTYPE = torch.float32

MAX_BLOCK_SIZE = 1024
_ALIGNMENT = 4
"""Divisor of each segment's number of values, so that all segments are aligned without padding."""

_DIMENSIONS = ("layers", "planes", "block_size", "kv_heads", "head_dim")


class LayoutError(ValueError):
    """Segments that can't be read or converted; `field` names the bad field."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class SegmentLayout:
    """A segment's place in its block, in bytes; `planes` counts the planes of all layers."""

    info: SegmentInfo
    start: int

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.info.dtype]

    @property
    def quantized(self) -> bool:
        """Return whether there is a scale for each block."""
        return self.info.quantization in CODE_DTYPES

    @property
    def in_rows(self) -> bool:
        """Return whether there is a scale for each row, so that a row's bytes depend on no other row."""
        return self.info.quantization in _CACHE_DTYPES

    @property
    def planes(self) -> int:
        return self.info.shape[0] * self.info.shape[1]

    @property
    def tokens_shape(self) -> tuple[int, int, int]:
        """Return the shape of one plane: block_size, kv_heads, head_dim."""
        _, _, block_size, kv_heads, head_dim = self.info.shape
        return block_size, kv_heads, head_dim

    @property
    def code_dtype(self) -> torch.dtype:
        """Return the dtype of the stored values."""
        if self.in_rows:
            return torch.uint8
        return CODE_DTYPES[self.info.quantization] if self.quantized else self.dtype

    @property
    def values_bytes(self) -> int:
        return self.planes * math.prod(self.tokens_shape) * self.code_dtype.itemsize

    @property
    def scales_bytes(self) -> int:
        block_size, kv_heads, _ = self.tokens_shape
        scales = kv_heads if self.quantized else block_size * kv_heads if self.in_rows else 0
        return self.planes * scales * SCALE_DTYPE.itemsize

    @property
    def nbytes(self) -> int:
        return self.values_bytes + self.scales_bytes

    def values(self, blocks: Tensor) -> Tensor:
        """Return a view of the values in blocks [n, block_bytes]: [n, planes, *tokens_shape]."""
        if self.in_rows:
            tokens = self._tokens(blocks)[..., : -self.tokens_shape[1] * SCALE_DTYPE.itemsize]
            return tokens.unflatten(3, self.tokens_shape[1:])
        raw = blocks[:, self.start : self.start + self.values_bytes]
        return raw.view(self.code_dtype).view(len(blocks), self.planes, *self.tokens_shape)

    def scales(self, blocks: Tensor) -> Tensor:
        """Return a view of the scales: [n, planes, 1 (rows: block_size), kv_heads, 1]."""
        if self.in_rows:
            tokens = self._tokens(blocks)[..., -self.tokens_shape[1] * SCALE_DTYPE.itemsize :]
            return tokens.view(SCALE_DTYPE).unsqueeze(4)
        start = self.start + self.values_bytes
        raw = blocks[:, start : start + self.scales_bytes]
        return raw.view(SCALE_DTYPE).view(len(blocks), self.planes, 1, self.tokens_shape[1], 1)

    def _tokens(self, blocks: Tensor) -> Tensor:
        """Return the bytes [n, planes, block_size, ...] of tokens, each with its scales."""
        whole = blocks[:, self.start : self.start + self.nbytes]
        return whole.unflatten(1, (self.planes, self.tokens_shape[0], -1))


class BlockLayout:
    """The places of the segments in a block. Raises LayoutError for segments that this module can't read."""

    def __init__(self, segments: Sequence[SegmentInfo]) -> None:
        problem = _layout_problem(segments)
        if problem is not None:
            raise LayoutError(*problem)
        self.segments: list[SegmentLayout] = []
        self.block_bytes = 0
        for info in segments:
            self.segments.append(SegmentLayout(info, self.block_bytes))
            self.block_bytes += self.segments[-1].nbytes
        self.block_size = segments[0].shape[2]

    def blocks(self, buffer: memoryview | Tensor) -> Tensor:
        """Return the blocks in a writable buffer as a tensor, uint8 [n, block_bytes]."""
        if isinstance(buffer, Tensor):
            return buffer
        count = buffer.nbytes // self.block_bytes
        if count == 0:
            return torch.empty((0, self.block_bytes), dtype=torch.uint8)
        flat = torch.frombuffer(buffer, dtype=torch.uint8, count=count * self.block_bytes)
        return flat.view(count, self.block_bytes)


def block_bytes(segments: Sequence[SegmentInfo]) -> int:
    """Return the bytes of one block. Raises LayoutError."""
    return BlockLayout(segments).block_bytes


def wire_segments(segments: Sequence[SegmentInfo], wire_dtype: str) -> tuple[SegmentInfo, ...]:
    """Return a pool's segments on the wire; `wire_dtype` is "auto", "int8" or "fp8". Raises LayoutError."""
    if wire_dtype == "auto":
        return tuple(segments)
    if wire_dtype not in CODE_DTYPES:
        raise LayoutError("quantization", f"{wire_dtype!r} is none of auto, {', '.join(CODE_DTYPES)}")
    if any(segment.quantization != "none" for segment in segments):
        raise LayoutError("quantization", "the pool itself is quantized: it needs --kv-wire-dtype auto")
    wire = tuple(msgspec.structs.replace(segment, quantization=wire_dtype) for segment in segments)
    BlockLayout(wire)
    return wire


def foreign_format(wire: Sequence[SegmentInfo], ours: Sequence[SegmentInfo]) -> str:
    """Return how dtype and quantization on the wire differ from our pool's; empty if they are equal."""
    theirs_and_ours = ([(each.dtype, each.quantization) for each in side] for side in (wire, ours))
    theirs, here = theirs_and_ours
    return "" if theirs == here else ",".join("/".join(pair) for pair in theirs)


def conversion_problem(wire: Sequence[SegmentInfo], ours: Sequence[SegmentInfo]) -> tuple[str, str] | None:
    """Return (field, reason) if wire blocks can't be converted to blocks of our pool, else None.

    Dtypes may differ among `DTYPES`, and the wire may be quantized, except with a state. All else must agree.
    `wire` may come from a peer, so only its types are trusted.
    """
    if tuple(wire) == tuple(ours):
        return None
    theirs_names, our_names = ([segment.name for segment in side] for side in (wire, ours))
    if theirs_names != our_names:
        return "segments", _unlike(theirs_names, our_names)
    if any(segment.kind == STATE for segment in ours):
        their, our = next(pair for pair in zip(wire, ours, strict=True) if pair[0] != pair[1])
        return "segments", f"blocks beside a state are not converted: {_unlike(their, our)}"
    for side in (wire, ours):
        if problem := _layout_problem(side):
            return problem
    for their, our in zip(wire, ours, strict=True):
        if their.kind != our.kind:
            return "kind", f"{our.name}: {_unlike(their.kind, our.kind)}"
        if reason := _unlike_quantization(their, our):
            return "quantization", f"{our.name}: {reason}"
        for name, there, here in zip(_DIMENSIONS, their.shape, our.shape, strict=True):
            if there != here:
                hint = "; start both with the same --block-size" if name == "block_size" else ""
                return name, f"{our.name}: {_unlike(there, here)}{hint}"
    return None


def tokens_in_blocks(
    positions: npt.NDArray[np.int64], block_size: int, num_tokens: int
) -> npt.NDArray[np.int64]:
    """Return the number of a prompt's `num_tokens` tokens in each of its blocks at `positions`."""
    return np.clip(num_tokens - positions * block_size, 0, block_size)


def _layout_problem(segments: Sequence[SegmentInfo]) -> tuple[str, str] | None:
    if not segments:
        return "segments", "blocks without segments are opaque"
    for segment in segments:
        if problem := _segment_problem(segment):
            return problem
    if len({segment.shape[2] for segment in segments}) > 1:
        return "block_size", "the segments of one block differ in it"
    return None


def _segment_problem(segment: SegmentInfo) -> tuple[str, str] | None:
    name, shape = segment.name, segment.shape
    if segment.kind not in (PAGED, WINDOWED):
        return "kind", f"{name}: {segment.kind!r} is neither {PAGED!r} nor {WINDOWED!r}"
    if segment.block_pool != 0:
        return "block_pool", f"{name}: it lies in block pool {segment.block_pool}, not in the first one"
    if segment.dtype not in DTYPES:
        return "dtype", f"{name}: {segment.dtype!r} is none of {', '.join(DTYPES)}"
    known = ("none", *CODE_DTYPES, *_CACHE_DTYPES)
    if segment.quantization not in known:
        return "quantization", f"{name}: {segment.quantization!r} is none of {', '.join(known)}"
    if len(shape) != len(_DIMENSIONS) or min(shape) < 1:
        return "shape", f"{name}: {shape} is not [layers, planes, block_size, kv_heads, head_dim]"
    if shape[2] > MAX_BLOCK_SIZE:
        return "block_size", f"{name}: {shape[2]} is over the limit of {MAX_BLOCK_SIZE}"
    if math.prod(shape) % _ALIGNMENT:
        return "shape", f"{name}: {math.prod(shape)} values in a block are not a multiple of {_ALIGNMENT}"
    return None


def _unlike_quantization(their: SegmentInfo, our: SegmentInfo) -> str:
    """Return why our pool cannot store this wire's quantization; empty if it can."""
    if our.quantization in CODE_DTYPES:
        return f"this pool is itself quantized ({our.quantization})"
    there, here = (_CACHE_DTYPES.get(side.quantization, "auto") for side in (their, our))
    if there == here:
        return ""
    return f"the sender has --kv-cache-dtype {there}, here it is {here}; start both with the same one"


def _unlike(there: object, here: object) -> str:
    return f"the sender has {there!r:.200}, here it is {here!r:.200}"


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
