"""The choice, for each piece of one connection, whether to send it coded (`blocks.codec`); and its coding.

Coding pays only on slow wires. A piece is coded if encoding takes less time than the wire needs for the saved
bytes, and if coded pieces were acknowledged sooner, for their size, than plain ones. Now and then some pieces
are sent the other way, so that both figures stay true.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import median

from kvtransfer.blocks.codec import Codec, slices
from kvtransfer.blocks.extents import BlockIndices, Buffers
from kvtransfer.messages import GOOD, SIZE_BYTES, SPOILED
from kvtransfer.streams.pieces import QueuedPiece

MEASURED_BYTES = 1024 * 1024
"""Least bytes of a piece whose time is recorded: the time of a small one says little about the bandwidth."""
LEAST_BYTES = 64 * 1024
"""Least bytes of a piece that is coded."""
_KEPT = 3
"""Number of measurements kept, of coded and of plain pieces each. Medians of fewer are not compared."""
_PERIOD = 128
"""Number of pieces after which the choice that is not in use (coded or plain) is measured again."""


class WireCoding:
    """The encoder of one connection's pieces, with blocks of `block_bytes` bytes. For one stream's thread."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._codec = Codec(block_bytes)
        self._seconds: dict[bool, deque[float]] = {coded: deque(maxlen=_KEPT) for coded in (False, True)}
        self._acknowledged_at = 0.0
        self._choices = 0
        self._is_faster = False
        self._ratio = self._encoding_s = 0.0
        """Coded bytes, and seconds of encoding, per plain byte."""

    def chooses(self, buffer: memoryview, blocks: BlockIndices) -> bool:
        """Return whether to code the piece that consists of these blocks of `buffer`."""
        nbytes = len(blocks) * self._block_bytes
        plain, coded = self._seconds[False], self._seconds[True]
        if nbytes < LEAST_BYTES or len(plain) < _KEPT:
            return False
        if self._choices % _PERIOD == 0:
            self._try(buffer, blocks, nbytes)
            (plain if self._is_faster else coded).clear()
        self._choices += 1
        if not plain or median(plain) * (1 - self._ratio) <= self._encoding_s:
            return False
        self._is_faster = len(coded) < _KEPT or median(coded) < median(plain)
        return self._is_faster

    def slices(self, buffer: memoryview, blocks: BlockIndices, piece: QueuedPiece) -> Iterator[Buffers]:
        """Encode a piece slice by slice, each after the previous one is sent, and count the coded bytes.

        A piece that is no longer wanted ends as spoiled before its next slice.
        """
        nbytes = len(blocks) * self._block_bytes
        piece.wire_bytes = 0
        for first, last in slices(nbytes):
            if not piece.wanted:
                yield [memoryview(SPOILED)]
                return
            coded = self._codec.encode(buffer, blocks, first, last)
            piece.wire_bytes += len(coded)
            size = memoryview(len(coded).to_bytes(SIZE_BYTES, "little"))
            yield [size, coded, memoryview(GOOD)] if last == nbytes else [size, coded]

    def acknowledged(self, piece: QueuedPiece) -> None:
        """Record the time of an acknowledged piece, without the time that it waited for earlier pieces."""
        now, nbytes = time.monotonic(), piece.num_blocks * self._block_bytes
        if nbytes >= MEASURED_BYTES:
            self._seconds[piece.coded].append((now - max(piece.sent_at, self._acknowledged_at)) / nbytes)
        self._acknowledged_at = now

    def _try(self, buffer: memoryview, blocks: BlockIndices, nbytes: int) -> None:
        """Measure the encoding of the piece's first slice; keep the shortest, least disturbed time."""
        _, last = next(slices(nbytes))
        seconds = []
        for _ in range(_KEPT):
            started = time.perf_counter()
            self._ratio = len(self._codec.encode(buffer, blocks, 0, last)) / last
            seconds.append(time.perf_counter() - started)
        self._encoding_s = min(seconds) / last
