"""Decides, for each piece of one connection, whether it is sent coded (`blocks.codec`), and codes it.

Coding pays on slow wires alone. A piece is coded if two comparisons are in its favour: the wire's seconds
for the bytes that it saves exceed the seconds of encoding, and coded pieces were acknowledged sooner for
their size than plain ones. Now and then some pieces are sent the other way, so that both figures stay true.
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
"""The least bytes of a piece that counts: the time of a small one says little about the wire's bandwidth."""
LEAST_BYTES = 64 * 1024
"""The least bytes of a piece that is coded."""
_KEPT = 3
"""Measurements of each way whose median counts. Until there are so many, the way is not judged."""
_PERIOD = 128
"""Pieces after which the way that is not in use is measured again."""


class WireCoding:
    """Codes pieces of blocks of `block_bytes` bytes. For one stream's thread."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._codec = Codec(block_bytes)
        self._seconds: dict[bool, deque[float]] = {coded: deque(maxlen=_KEPT) for coded in (False, True)}
        self._acknowledged_at = 0.0
        self._choices = 0
        self._is_faster = False
        self._ratio = self._encoding_s = 0.0
        """Coded bytes, and seconds of encoding, for each plain byte."""

    def chooses(self, buffer: memoryview, blocks: BlockIndices) -> bool:
        """Decide whether to code a piece, these blocks of `buffer`."""
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
        """Encode a piece slice by slice, each when the one before is sent, and count the coded bytes.

        A piece that is not wanted any more ends before the next slice, as spoiled.
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
        """Record the time that an acknowledged piece took, without the time behind earlier ones."""
        now, nbytes = time.monotonic(), piece.num_blocks * self._block_bytes
        if nbytes >= MEASURED_BYTES:
            self._seconds[piece.coded].append((now - max(piece.sent_at, self._acknowledged_at)) / nbytes)
        self._acknowledged_at = now

    def _try(self, buffer: memoryview, blocks: BlockIndices, nbytes: int) -> None:
        """Measure encoding on the piece's first slice; the shortest time is that of an undisturbed thread."""
        _, last = next(slices(nbytes))
        seconds = []
        for _ in range(_KEPT):
            started = time.perf_counter()
            self._ratio = len(self._codec.encode(buffer, blocks, 0, last)) / last
            seconds.append(time.perf_counter() - started)
        self._encoding_s = min(seconds) / last
