"""Pieces to send: their queue, and their transfer times."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kvtransfer.blocks.device import PAST, StreamMark
from kvtransfer.blocks.extents import RUN_BYTES, Blocks, to_wire


@dataclass(eq=False)
class QueuedPiece:
    """Consecutive parts of a lease in one block pool; the first is part `index` of the lease.

    The piece was pushed `pushed_s` after the lease's first one, when `num_tokens` of the prompt were valid;
    its blocks are complete `after` this mark. `wanted` becomes False when the lease is aborted. The last
    transmission was `coded` or not, and had `wire_bytes` bytes.
    """

    lease_id: str
    index: int
    parts: list[Blocks]
    num_tokens: int
    final: bool
    after: StreamMark = PAST
    block_pool: int = 0
    pushed_s: float = 0.0
    wanted: bool = True
    coded: bool = False
    wire_bytes: int = 0
    attempts: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    sent_at: float = 0.0

    @cached_property
    def blocks(self) -> Blocks:
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=1)

    @cached_property
    def runs(self) -> bytes:
        return to_wire(self.blocks)

    @property
    def num_runs(self) -> int:
        return len(self.runs) // RUN_BYTES

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]

    def split(self, num_parts: int) -> tuple[QueuedPiece, QueuedPiece]:
        """Split into one piece with the first `num_parts` parts and one with the rest."""
        first = replace(self, parts=self.parts[:num_parts], final=False)
        return first, replace(self, parts=self.parts[num_parts:], index=self.index + num_parts)


class PieceQueue:
    """Pieces that wait for a stream. Leases take turns, so that a long prompt does not delay a short one."""

    def __init__(self) -> None:
        self._by_lease: OrderedDict[str, deque[QueuedPiece]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_lease)

    def put(self, piece: QueuedPiece) -> None:
        self._by_lease.setdefault(piece.lease_id, deque()).append(piece)

    def put_back(self, pieces: list[QueuedPiece]) -> None:
        """Return taken pieces to the front of the queue."""
        for piece in reversed(pieces):
            self._by_lease.setdefault(piece.lease_id, deque()).appendleft(piece)

    def take(self, max_parts: int) -> QueuedPiece | None:
        """Return the next piece of the lease whose turn it is, or its first `max_parts` parts."""
        if not self._by_lease:
            return None
        lease_id, queue = self._by_lease.popitem(last=False)
        piece = queue.popleft()
        if len(piece.parts) > max_parts:
            piece, rest = piece.split(max_parts)
            queue.appendleft(rest)
        if queue:
            self._by_lease[lease_id] = queue
        return piece

    def drop(self, lease_id: str) -> None:
        self._by_lease.pop(lease_id, None)

    def clear(self) -> None:
        self._by_lease.clear()


@dataclass
class TransferTime:
    """The times when one lease's pieces were queued, sent and acknowledged, in monotonic seconds."""

    started: float = field(default_factory=time.monotonic)
    final_push: float | None = None
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, piece: QueuedPiece, acknowledged_at: float) -> None:
        self._spans.append((piece.sent_at, acknowledged_at))

    def busy_s(self, until: float | None = None) -> float:
        """Return the seconds, up to `until`, during which some piece was in flight."""
        busy, reached = 0.0, self.started
        for sent, acknowledged in sorted(self._spans):
            end = acknowledged if until is None else min(acknowledged, until)
            busy += max(0.0, end - max(sent, reached))
            reached = max(reached, end)
        return busy
