"""Lists of (source block, target block) pairs: coalesced into runs, cut into pieces, laid out as buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MAX_RUNS = 1000
PIECE_BYTES = 4 * 1024 * 1024
BATCH_BYTES = 1024 * 1024
BATCH_BUFFERS = 256
"""Well under IOV_MAX (1024): the kernel walks the whole list at each call, however much it then moves."""


class Run(NamedTuple):
    """`length` adjacent source blocks that go to as many adjacent target blocks."""

    source: int
    target: int
    length: int


def coalesce(extents: Iterable[tuple[int, int]]) -> list[Run]:
    """Merge pairs that follow each other on both sides; the order stays."""
    runs: list[Run] = []
    source = target = count = 0
    for next_source, next_target in extents:
        if count and next_source == source + count and next_target == target + count:
            count += 1
            continue
        if count:
            runs.append(Run(source, target, count))
        source, target, count = next_source, next_target, 1
    if count:
        runs.append(Run(source, target, count))
    return runs


def blocks_per_piece(block_bytes: int) -> int:
    return max(1, PIECE_BYTES // block_bytes)


def cut(runs: Iterable[Run], max_blocks: int, max_runs: int = MAX_RUNS) -> Iterator[list[Run]]:
    """Cut into pieces of at most `max_blocks` blocks in at most `max_runs` runs each."""
    piece: list[Run] = []
    room = max_blocks
    for source, target, count in runs:
        while count:
            taken = min(count, room)
            piece.append(Run(source, target, taken))
            source, target, count, room = source + taken, target + taken, count - taken, room - taken
            if room == 0 or len(piece) == max_runs:
                yield piece
                piece, room = [], max_blocks
    if piece:
        yield piece


def num_blocks(runs: Iterable[Run]) -> int:
    return sum(run.length for run in runs)


def merge_adjacent(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (first, count) ranges that follow each other: one side's view of some runs."""
    merged: list[tuple[int, int]] = []
    for first, count in ranges:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged


class ScatterList:
    """Buffers that a stream fills or empties in order, some bytes at a time."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = list(buffers)
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
        while nbytes or (self._next < len(self._buffers) and not self._buffers[self._next].nbytes):
            buffer = self._buffers[self._next]
            if nbytes < buffer.nbytes:
                self._buffers[self._next] = buffer[nbytes:]
                return
            nbytes -= buffer.nbytes
            self._next += 1

    def rest(self) -> tuple[int, list[memoryview]]:
        """How many buffers are done, and what is left of the others."""
        return self._next, self._buffers[self._next :]
