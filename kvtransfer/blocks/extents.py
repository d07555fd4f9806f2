"""Blocks and their positions: cut into parts, encoded as runs for the wire, viewed as buffers, checksummed.

`Blocks` are int64 [2, num_blocks]: the sender's blocks, and each block's position in the prompt, which the
receiver maps to its own blocks. On the wire they are runs of (first block, first position, number of blocks),
three little-endian int32 each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from hashlib import shake_128
from itertools import accumulate, chain
from operator import sub
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from protocol.errors import ProtocolError

BlockIndices: TypeAlias = npt.NDArray[np.int64]
Blocks: TypeAlias = npt.NDArray[np.int64]

PART_BYTES = 16 * 1024 * 1024
"""Bytes of a part: few enough that on a slow wire no request delays the others for long."""
PARTS_AT_ONCE = 4
"""Parts in a piece that the receiver reads itself. A part takes some milliseconds to read, so the cost per
piece, up to half a millisecond, matters little.
"""
MAX_PIECE_BLOCKS = 4096
RUN_BYTES = 12
_WIRE_TYPE = np.dtype("<i4")
NO_BLOCKS: Blocks = np.zeros((2, 0), dtype=np.int64)

BATCH_BYTES = 1024 * 1024
"""Bytes offered to one system call: about the size of a socket's buffer. The kernel walks the whole list of
buffers at each call, however few bytes it moves.
"""
MAX_BATCH_BUFFERS = 512
"""Under IOV_MAX (1024)."""


def blocks_per_part(block_bytes: int) -> int:
    return min(MAX_PIECE_BLOCKS // PARTS_AT_ONCE, max(1, PART_BYTES // block_bytes))


def cut(source: Sequence[int], first_position: int, source_blocks: int, max_blocks: int) -> list[Blocks]:
    """Cut into parts of at most `max_blocks` blocks, in order. An empty source gives no part.

    Raises ValueError for a block outside of the source's `source_blocks`, or a position above any prompt's.
    """
    indices = np.asarray(source, dtype=np.int64).reshape(-1)
    if len(indices) and (indices.min() < 0 or indices.max() >= source_blocks):
        raise ValueError(f"source blocks must be in [0, {source_blocks})")
    if first_position < 0 or first_position + len(indices) > 2**31:
        raise ValueError("positions must be in [0, 2**31)")
    blocks = np.stack((indices, np.arange(first_position, first_position + len(indices))))
    return [blocks[:, start : start + max_blocks] for start in range(0, len(indices), max_blocks)]


def runs(blocks: Blocks) -> BlockIndices:
    """Return as few runs as the order allows, int64 [runs, 3]: first value of each row, number of blocks."""
    breaks = np.flatnonzero((np.diff(blocks) != 1).any(axis=0)) + 1
    starts = np.concatenate((np.zeros(min(1, blocks.shape[1]), dtype=np.int64), breaks))
    lengths = np.diff(starts, append=blocks.shape[1])
    return np.column_stack((*blocks[:, starts], lengths))


def to_wire(blocks: Blocks) -> bytes:
    return runs(blocks).astype(_WIRE_TYPE).tobytes()


def from_wire(raw: bytes, source_blocks: int, max_blocks: int) -> Blocks:
    """Decode runs. Raises ProtocolError for blocks that the source lacks, or more than `max_blocks`."""
    if len(raw) % RUN_BYTES:
        raise ProtocolError(f"runs of {len(raw)} bytes are not a multiple of {RUN_BYTES}")
    if not raw:
        return NO_BLOCKS
    runs = np.frombuffer(raw, dtype=_WIRE_TYPE).reshape(-1, 3).astype(np.int64)
    lengths = runs[:, 2]
    if runs.min() < 0 or lengths.min() < 1:
        raise ProtocolError("a run has a negative block or no length")
    ends = np.cumsum(lengths)
    num_blocks = int(ends[-1])
    if (runs[:, 0] + lengths).max() > source_blocks:
        raise ProtocolError(f"a run leaves the sender's {source_blocks} blocks")
    if num_blocks > max_blocks:
        raise ProtocolError(f"a piece of {num_blocks} blocks is over the limit of {max_blocks}")
    starts = np.ascontiguousarray(runs[:, :2].T) - (ends - lengths)
    return np.repeat(starts, lengths, axis=1) + np.arange(num_blocks)


class BufferViews:
    """The parts [starts[i], ends[i]) of a buffer, in bytes.

    Views are made on access: a thousand at once would trigger the garbage collector.
    """

    def __init__(self, buffer: memoryview, starts: list[int], ends: list[int]) -> None:
        self._buffer = buffer
        self._starts = starts
        self._ends = ends

    @property
    def lengths(self) -> list[int]:
        return list(map(sub, self._ends, self._starts))

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[memoryview]:
        return chain.from_iterable(self[at : at + 1] for at in range(len(self)))

    def __getitem__(self, index: slice) -> list[memoryview]:
        pairs = zip(self._starts[index], self._ends[index], strict=True)
        return [self._buffer[start:end] for start, end in pairs]


Buffers: TypeAlias = Sequence[memoryview | BufferViews]


def views(buffer: memoryview, block_bytes: int, blocks: BlockIndices) -> BufferViews:
    """Return the memory of these blocks, in order, in as few buffers as possible."""
    firsts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    starts = blocks[firsts] * block_bytes
    ends = starts + np.diff(firsts, append=len(blocks)) * block_bytes
    return BufferViews(buffer, starts.tolist(), ends.tolist())


def address(buffer: memoryview) -> int:
    """Return the buffer's memory address. The buffer must not move while the address is used."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


class ScatterList:
    """Buffers that a stream fills or empties in order, some bytes at a time."""

    def __init__(self, buffers: Buffers) -> None:
        self._parts = [part if isinstance(part, BufferViews) else [part] for part in buffers]
        self._firsts = [0, *accumulate(map(len, self._parts))]
        lengths = (part.lengths if isinstance(part, BufferViews) else map(len, part) for part in self._parts)
        self._ends = list(accumulate(chain.from_iterable(lengths)))
        self.done = 0
        nbytes = self._ends[-1] if self._ends else 0
        self._batch_buffers = max(1, min(MAX_BATCH_BUFFERS, BATCH_BYTES * len(self._ends) // max(1, nbytes)))

    @property
    def remaining(self) -> int:
        return self._ends[-1] - self.done if self._ends else 0

    def batch(self) -> list[memoryview]:
        """Return the buffers for the next system call."""
        first = bisect_right(self._ends, self.done)
        batch = self._slice(first, first + self._batch_buffers)
        batch[0] = batch[0][len(batch[0]) - (self._ends[first] - self.done) :]
        return batch

    def advance(self, nbytes: int) -> None:
        self.done += nbytes

    def _slice(self, first: int, last: int) -> list[memoryview]:
        """Return the buffers [first, last), counted over all parts."""
        chosen: list[memoryview] = []
        for part, start in zip(self._parts, self._firsts, strict=False):
            chosen += part[max(0, first - start) : max(0, last - start)]
        return chosen


Mode = Literal["off", "sampled", "full"]
SHARES = 16


def piece_checksum(
    mode: Mode, buffer: memoryview, block_bytes: int, blocks: BlockIndices, lease_id: str, index: int
) -> bytes | None:
    """Return the eight-byte checksum of a piece, in `blocks` of `buffer`, or None if `mode` is `off`."""
    if mode == "off":
        return None
    parts = views(buffer, block_bytes, blocks)
    if mode == "sampled":
        shares = chosen_shares(lease_id, index, len(blocks))
        starts = blocks * block_bytes + shares * block_bytes // SHARES
        ends = blocks * block_bytes + (shares + 1) * block_bytes // SHARES
        parts = BufferViews(buffer, starts.tolist(), ends.tolist())
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def chosen_shares(lease_id: str, index: int, count: int) -> BlockIndices:
    """Return the sixteenth of each block that a sampled checksum covers: int64 [count], in [0, 16)."""
    stream = shake_128(f"{index}/{lease_id}".encode()).digest(count)
    return np.frombuffer(stream, np.uint8).astype(np.int64) % SHARES
