"""Lists of (source block, target block) pairs: cut into pieces, coalesced into runs, laid out as buffers.

Runs are an int32 array [num_runs, 3] of (first source block, first target block, number of blocks); on the
wire they are its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError

Runs: TypeAlias = npt.NDArray[np.int32]
BlockIndices: TypeAlias = npt.NDArray[np.int64]

PIECE_BYTES = 8 * 1024 * 1024
MAX_PIECE_BLOCKS = 4096
RUN_BYTES = 12
_WIRE_TYPE = np.dtype("<i4")
NO_RUNS: Runs = np.zeros((0, 3), dtype=np.int32)

BATCH_BYTES = 1024 * 1024
BATCH_BUFFERS = 256
"""Well under IOV_MAX (1024): the kernel walks the whole list at each call, however much it then moves."""


def blocks_per_piece(block_bytes: int) -> int:
    """The most blocks in one piece, so that no request holds up the others for long."""
    return min(MAX_PIECE_BLOCKS, max(1, PIECE_BYTES // block_bytes))


def cut(extents: Sequence[tuple[int, int]], source_blocks: int, max_blocks: int) -> list[Runs]:
    """The runs of each piece of at most `max_blocks` blocks, in order. Nothing to move gives no piece.

    Raises ValueError for a block that the source does not have, or no pool can have.
    """
    pairs = np.asarray(extents, dtype=np.int64).reshape(-1, 2)
    if len(pairs) and (pairs.min() < 0 or pairs[:, 0].max() >= source_blocks or pairs.max() >= 2**31):
        raise ValueError(f"source blocks must be in [0, {source_blocks}), target blocks in [0, 2**31)")
    return [coalesce(pairs[start : start + max_blocks]) for start in range(0, len(pairs), max_blocks)]


def coalesce(pairs: BlockIndices) -> Runs:
    """Merge the pairs that follow each other on both sides; the order stays."""
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
    starts = np.concatenate((np.zeros(min(1, len(pairs)), dtype=np.int64), breaks))
    lengths = np.diff(starts, append=len(pairs))
    return np.column_stack((pairs[starts], lengths)).astype(np.int32)


def num_blocks(runs: Runs) -> int:
    return int(runs[:, 2].sum(dtype=np.int64))


def expand(first: Runs, lengths: Runs) -> BlockIndices:
    """Every block of some ranges, in order."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def merge_adjacent(first: Runs, lengths: Runs) -> list[tuple[int, int]]:
    """The ranges (first, length) of one side, those that follow each other merged."""
    starts = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1] + lengths[:-1]))[: len(first)])
    return list(zip(first[starts].tolist(), np.add.reduceat(lengths, starts).tolist(), strict=True))


def to_wire(runs: Runs) -> bytes:
    return runs.astype(_WIRE_TYPE, copy=False).tobytes()


def from_wire(raw: bytes, source_blocks: int, max_blocks: int) -> Runs:
    """Raises ProtocolError for runs that leave a source of so many blocks, or are too many at once."""
    if len(raw) % RUN_BYTES:
        raise ProtocolError(f"runs of {len(raw)} bytes are not a multiple of {RUN_BYTES}")
    runs = np.frombuffer(raw, dtype=_WIRE_TYPE).reshape(-1, 3)
    source, _, lengths = runs.astype(np.int64).T
    if (runs[:, :2] < 0).any() or (lengths < 1).any():
        raise ProtocolError("a run has a negative block or no length")
    if (source + lengths > source_blocks).any():
        raise ProtocolError(f"a run leaves the sender's {source_blocks} blocks")
    if lengths.sum() > max_blocks:
        raise ProtocolError(f"a piece of {lengths.sum()} blocks is over the limit of {max_blocks}")
    return runs.astype(np.int32, copy=False)


class ScatterList:
    """Buffers that a stream fills or empties in order, some bytes at a time."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.nbytes]
        self._next = 0
        self.remaining = sum(buffer.nbytes for buffer in self._buffers)

    def batch(self) -> list[memoryview]:
        """The buffers for the next system call."""
        end, size = self._next, 0
        limit = min(len(self._buffers), self._next + BATCH_BUFFERS)
        while end < limit and size < BATCH_BYTES:
            size += self._buffers[end].nbytes
            end += 1
        return self._buffers[self._next : end]

    def advance(self, nbytes: int) -> None:
        """The last batch's first `nbytes` bytes are done."""
        self.remaining -= nbytes
        while nbytes:
            buffer = self._buffers[self._next]
            if nbytes < buffer.nbytes:
                self._buffers[self._next] = buffer[nbytes:]
                return
            nbytes -= buffer.nbytes
            self._next += 1

    def rest(self) -> tuple[int, list[memoryview]]:
        """How many buffers are done, and what is left of the others."""
        return self._next, self._buffers[self._next :]
