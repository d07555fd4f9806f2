"""Lists of pairs of blocks: cut into parts, coalesced into runs, laid out as buffers.

Runs are an int32 array [num_runs, 3] of (first source block, first target, number of blocks). On the wire,
as those bytes, a target is the block's position within the prompt; the receiver maps it to its own blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import sub
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt

from protocol.errors import ProtocolError

Runs: TypeAlias = npt.NDArray[np.int32]
BlockIndices: TypeAlias = npt.NDArray[np.int64]

PART_BYTES = 16 * 1024 * 1024
"""What a slow wire carries at once, so that no request holds up the others for long."""
PARTS_AT_ONCE = 4
"""So many parts make one piece where the receiver reads by itself: that takes some milliseconds, beside which
what every piece costs, up to half of one, is little."""
MAX_PIECE_BLOCKS = 4096
RUN_BYTES = 12
_WIRE_TYPE = np.dtype("<i4")
NO_RUNS: Runs = np.zeros((0, 3), dtype=np.int32)

BATCH_BYTES = 1024 * 1024
"""What a system call is offered: about what a socket's buffer takes or gives at once. The whole list of
buffers is walked at each call, however much it then moves."""
MAX_BATCH_BUFFERS = 512
"""Under IOV_MAX (1024)."""


def blocks_per_part(block_bytes: int) -> int:
    return min(MAX_PIECE_BLOCKS // PARTS_AT_ONCE, max(1, PART_BYTES // block_bytes))


def cut(source: Sequence[int], first_position: int, source_blocks: int, max_blocks: int) -> list[Runs]:
    """The runs of each part of at most `max_blocks` blocks, in order. Nothing to move gives no part.

    Raises ValueError for a block that the source does not have, or positions that no prompt can have.
    """
    blocks = np.asarray(source, dtype=np.int64).reshape(-1)
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= source_blocks):
        raise ValueError(f"source blocks must be in [0, {source_blocks})")
    if first_position < 0 or first_position + len(blocks) > 2**31:
        raise ValueError("positions must be in [0, 2**31)")
    pairs = np.column_stack((blocks, np.arange(first_position, first_position + len(blocks))))
    return [coalesce(pairs[start : start + max_blocks]) for start in range(0, len(pairs), max_blocks)]


def targets_of(runs: Runs, blocks: BlockIndices) -> Runs:
    """The same runs with each position replaced by the block that `blocks` has there."""
    source = expand(runs[:, 0], runs[:, 2])
    return coalesce(np.column_stack((source, blocks[expand(runs[:, 1], runs[:, 2])])))


def packed(runs: Runs) -> Runs:
    """The same source blocks, the targets one after the other from 0."""
    starts = np.cumsum(runs[:, 2]) - runs[:, 2]
    return np.column_stack((runs[:, 0], starts, runs[:, 2])).astype(np.int32)


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


def merge_adjacent(first: Runs, lengths: Runs) -> tuple[Runs, Runs]:
    """The ranges of one side, those that follow each other merged."""
    starts = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1] + lengths[:-1]))[: len(first)])
    return first[starts], np.add.reduceat(lengths, starts) if len(starts) else lengths


class Views(Sequence[memoryview]):
    """The parts [starts[i], ends[i]) of a buffer, in bytes.

    Each is made when it is asked for: a thousand at once would set off the garbage collector.
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

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, int):
            return self._buffer[self._starts[index] : self._ends[index]]
        pairs = zip(self._starts[index], self._ends[index], strict=True)
        return [self._buffer[start:end] for start, end in pairs]


Buffers: TypeAlias = Sequence[memoryview | Views]


def views(buffer: memoryview, block_bytes: int, first: Runs, lengths: Runs) -> Views:
    """The memory of some ranges of blocks, in as few buffers as possible."""
    first, lengths = merge_adjacent(first, lengths)
    starts = first.astype(np.int64) * block_bytes
    ends = starts + lengths.astype(np.int64) * block_bytes
    return Views(buffer, starts.tolist(), ends.tolist())


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

    def __init__(self, buffers: Buffers) -> None:
        self._parts = [part if isinstance(part, Views) else [part] for part in buffers]
        self._firsts = [0, *accumulate(map(len, self._parts))]
        lengths = (part.lengths if isinstance(part, Views) else map(len, part) for part in self._parts)
        self._ends = list(accumulate(chain.from_iterable(lengths)))
        self.done = 0
        nbytes = self._ends[-1] if self._ends else 0
        self._batch_buffers = max(1, min(MAX_BATCH_BUFFERS, BATCH_BYTES * len(self._ends) // max(1, nbytes)))

    @property
    def remaining(self) -> int:
        return self._ends[-1] - self.done if self._ends else 0

    def batch(self) -> list[memoryview]:
        """The buffers for the next system call."""
        first = bisect_right(self._ends, self.done)
        batch = self._slice(first, first + self._batch_buffers)
        batch[0] = batch[0][len(batch[0]) - (self._ends[first] - self.done) :]
        return batch

    def advance(self, nbytes: int) -> None:
        """The next `nbytes` bytes are done."""
        self.done += nbytes

    def _slice(self, first: int, last: int) -> list[memoryview]:
        """The buffers [first, last) of all parts taken together."""
        chosen: list[memoryview] = []
        for part, start in zip(self._parts, self._firsts, strict=False):
            chosen += part[max(0, first - start) : max(0, last - start)]
        return chosen
