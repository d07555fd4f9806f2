"""Leases: each permits one sender to write some blocks, and records the pieces that have arrived."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.blocks.device import PAST, StreamMark
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.interface import Arrival
from kvtransfer.messages import Piece, PieceRefusal
from protocol.handoff import Extent


class WriteGate:
    """A lock that admits writers until it is closed, then calls `on_empty` when the last writer has left.

    Closing the gate `within` closes this one, too.
    """

    def __init__(self, on_empty: Callable[[], None] | None = None, within: WriteGate | None = None) -> None:
        self._state = threading.Condition()
        self._writers = 0
        self._open = True
        self._on_empty = on_empty
        self._within = within

    @property
    def is_open(self) -> bool:
        return self._open and (self._within is None or self._within.is_open)

    def enter(self) -> bool:
        """Return whether the caller may write now. If so, it must call `leave` afterwards."""
        if self._within is not None and not self._within.enter():
            return False
        with self._state:
            if self._open:
                self._writers += 1
                return True
        if self._within is not None:
            self._within.leave()
        return False

    def leave(self) -> None:
        with self._state:
            self._writers -= 1
            emptied = not self._writers and not self._open
            self._state.notify_all()
        if emptied and self._on_empty is not None:
            self._on_empty()
        if self._within is not None:
            self._within.leave()

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Enclose one write of bounded duration; yield whether it is allowed."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave()

    def close(self) -> bool:
        """Admit no more writers. Return whether no write is running; otherwise `on_empty` follows."""
        with self._state:
            self._open = False
            return not self._writers

    def wait_empty(self, deadline: float) -> bool:
        """Return whether the last writer has left by the deadline (monotonic seconds)."""
        with self._state:
            return self._state.wait_for(lambda: not self._writers, max(0.0, deadline - time.monotonic()))


@dataclass(frozen=True)
class PieceArrival:
    """The arrival of a piece of `nbytes` bytes on the wire, `announced` at a time in monotonic seconds."""

    transport: str
    foreign_format: str
    nbytes: int
    announced: float


def arrival_of(pieces: Sequence[tuple[Piece, PieceArrival]]) -> Arrival:
    """Summarize the arrivals of a lease's pieces, right after the last one.

    The sender reports durations only, so the two clocks need not agree. Time in transit is not included.
    """
    now = time.monotonic()
    seconds = now - min(way.announced - piece.waited_s - piece.pushed_s for piece, way in pieces)
    final_push_s = max((piece.pushed_s for piece, _ in pieces if piece.final), default=0.0)
    return Arrival(
        at=now,
        transport=pieces[-1][1].transport,
        nbytes=sum(way.nbytes for _, way in pieces),
        seconds=seconds,
        exposed_s=max(0.0, seconds - final_push_s),
        wait_s=sum(piece.waited_s for piece, _ in pieces),
        foreign_formats=frozenset(way.foreign_format for _, way in pieces if way.foreign_format),
    )


@dataclass(slots=True)
class _Attempts:
    """Attempts to write one part: the latest one's number, and the gates of attempts that may still write."""

    number: int = -1
    gates: list[WriteGate] = field(default_factory=list)


class Lease:
    """Blocks of one prompt, in order, in one or more block pools, and the record of which have arrived.

    Only blocks in the `spans` of their block pools are written, [first, end) counted from the prompt's start:
    earlier blocks are cached, and maybe shared, or not needed. A *position* is a block's index in the prompt.
    """

    def __init__(
        self,
        lease_id: str,
        blocks: Mapping[int, BlockIndices],
        spans: Mapping[int, tuple[int, int]],
        num_tokens: int,
        gate: WriteGate,
        after: StreamMark = PAST,
    ) -> None:
        self.lease_id = lease_id
        self.blocks = blocks
        self.spans = spans
        self.num_tokens = num_tokens
        self.gate = gate
        self.after = after
        """The mark after the launched work that uses the blocks."""
        self.sender: str | None = None
        self.lost_at: float | None = None
        self.arrivals: list[tuple[Piece, PieceArrival]] = []
        self._received: dict[int, npt.NDArray[np.bool_]] = {
            block_pool: np.zeros(max(0, end - first), dtype=bool)
            for block_pool, (first, end) in spans.items()
        }
        self._parts: set[int] = set()
        self._attempts_lock = threading.Lock()
        self._attempts: defaultdict[int, _Attempts] = defaultdict(_Attempts)
        self._num_parts: int | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether every part has arrived, including the final one."""
        return len(self._parts) == self._num_parts

    def refusal(self, block_pool: int, positions: BlockIndices, sender: str) -> str:
        """Return why this sender may not write these positions of a block pool; empty if it may."""
        if self.sender is None:
            self.sender = sender
        if sender != self.sender:
            return PieceRefusal.OTHER_SENDER
        if block_pool not in self._received:
            return PieceRefusal.UNKNOWN_BLOCK_POOL
        inside = positions - self.spans[block_pool][0]
        if len(inside) and (inside.min() < 0 or inside.max() >= len(self._received[block_pool])):
            return PieceRefusal.OUTSIDE_OF_LEASE
        return ""

    def attempt(self, piece: Piece, deadline: float) -> tuple[WriteGate | None, str]:
        """Return the gate for an attempt to write a piece, once no earlier attempt writes to its parts any
        more.

        An earlier attempt, over a transport that the sender gave up, may still be reading blocks that the
        sender has reused. Return None and the reason if an earlier attempt does not end by the deadline, or a
        later one has begun.
        """
        gate = WriteGate(within=self.gate)
        earlier = []
        with self._attempts_lock:
            attempts = [self._attempts[index] for index in piece.part_indices]
            if any(other.number >= piece.attempt for other in attempts):
                return None, PieceRefusal.OVERTAKEN
            for other in attempts:
                other.number = piece.attempt
                writing = [each for each in other.gates if not each.close()]
                other.gates = [*writing, gate]
                earlier += writing
        is_alone = all(other.wait_empty(deadline) for other in earlier)
        return (gate, "") if is_alone else (None, PieceRefusal.STILL_WRITTEN)

    def record(self, piece: Piece, positions: BlockIndices) -> int:
        """Record that a piece is in place. Return how many blocks are in place in all block pools."""
        self._received[piece.block_pool][positions - self.spans[piece.block_pool][0]] = True
        self._parts.update(piece.part_indices)
        if piece.final:
            self._num_parts = piece.part_indices.stop
        return sum(int(received.sum()) for received in self._received.values())


REMEMBERED_LEASES = 4096
"""Number of ids that are kept of completed leases, whose pieces come again after a lost ack, and of given-up
ones, whose last pieces may still be on their way.
"""


class LeaseTable:
    """All leases of one receiver, for use from every thread. A block belongs to at most one of them."""

    def __init__(
        self, block_pools: Sequence[int], block_size: int, on_emptied: Callable[[str], None]
    ) -> None:
        """`block_pools` holds the number of blocks of each block pool; all pools are over the same blocks."""
        self._block_size = block_size
        self._on_emptied = on_emptied
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._closing: dict[str, Lease] = {}
        self._completed: OrderedDict[str, None] = OrderedDict()
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._block_pools = block_pools
        self._leased = np.zeros(max(block_pools), dtype=bool)
        self._connections: Counter[str] = Counter()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def num_closing(self) -> int:
        """Return the number of closed leases whose blocks are still being written."""
        return len(self._closing)

    def open(
        self,
        lease_id: str,
        extents: Sequence[Extent],
        first_token: int | Sequence[int] = 0,
        num_tokens: int | None = None,
        after: StreamMark = PAST,
    ) -> None:
        """Allow writes `after` this mark. Raises ValueError for a known lease or invalid blocks."""
        blocks = {extent.block_pool: np.asarray(extent.blocks, np.int64).reshape(-1) for extent in extents}
        if len(blocks) < len(extents) or not blocks.keys() <= set(range(len(self._block_pools))):
            raise ValueError(
                f"block pools of lease {lease_id} must differ and be in [0, {len(self._block_pools)})"
            )
        for block_pool, indices in blocks.items():
            limit = self._block_pools[block_pool]
            if len(indices) and not (indices.min() >= 0 and indices.max() < limit):
                raise ValueError(f"blocks of lease {lease_id} must be in [0, {limit})")
        lengths = [len(indices) for indices in blocks.values()]
        capacity = min(lengths, default=0) * self._block_size
        if num_tokens is None:
            num_tokens = max(lengths, default=0) * self._block_size
        elif num_tokens > capacity:
            raise ValueError(f"num_tokens of lease {lease_id} is {num_tokens}, its blocks hold {capacity}")
        firsts = [first_token] * len(blocks) if isinstance(first_token, int) else first_token
        end = -(-num_tokens // self._block_size)
        spans = {
            block_pool: (first // self._block_size, min(end, length))
            for block_pool, length, first in zip(blocks, lengths, firsts, strict=True)
        }
        gate = WriteGate(lambda: self._emptied(lease_id))
        lease = Lease(lease_id, blocks, spans, num_tokens, gate, after)
        with self._lock:
            if lease_id in self._leases or lease_id in self._closing:
                raise ValueError(f"lease {lease_id} is open already")
            written = self._written(lease)
            if self._leased[written].any() or len(np.unique(written)) < len(written):
                raise ValueError(f"blocks of lease {lease_id} are given twice, or of another open lease")
            self._mark(lease, True)
            self._leases[lease_id] = lease

    def close(self, lease_id: str) -> bool:
        """Allow no more writes under the lease. Return whether its blocks are free now. Idempotent.

        If they are not free yet, `on_emptied` is called once they are.
        """
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                return lease_id not in self._closing
            _remember(self._completed if lease.is_complete else self._given_up, lease_id)
            self._closing[lease_id] = lease
        return lease.gate.close() and self._unlease(lease_id)

    def close_all(self) -> None:
        for lease_id in list(self._leases):
            self.close(lease_id)

    def admit(self, piece: Piece, positions: BlockIndices, sender: str) -> tuple[Lease | None, str]:
        """Return the lease to write under, or None with the reason; "" if the piece has arrived before."""
        with self._lock:
            if piece.lease_id in self._completed:
                return None, ""
            lease = self._leases.get(piece.lease_id)
            if lease is None or not lease.gate.is_open:
                return None, PieceRefusal.UNKNOWN_LEASE
            refusal = lease.refusal(piece.block_pool, positions, sender)
            return (None, refusal) if refusal else (lease, "")

    def record(
        self, lease: Lease, piece: Piece, positions: BlockIndices, arrival: PieceArrival
    ) -> tuple[int, Arrival | None]:
        """Record a piece. Return the number of blocks in place and, after the last piece, the arrival."""
        with self._lock:
            lease.arrivals.append((piece, arrival))
            received = lease.record(piece, positions)
            return received, arrival_of(lease.arrivals) if lease.is_complete else None

    def was_given_up(self, lease_id: str) -> bool:
        """Return whether the lease was closed here before its last piece, as when its request is aborted."""
        return lease_id in self._given_up

    def connected(self, sender: str) -> None:
        """Count one more connection from this sender."""
        with self._lock:
            self._connections[sender] += 1
            for lease in self._leases.values():
                if lease.sender == sender:
                    lease.lost_at = None

    def disconnected(self, sender: str) -> None:
        with self._lock:
            self._connections[sender] -= 1
            if self._connections[sender] > 0:
                return
            del self._connections[sender]
            now = time.monotonic()
            for lease in self._leases.values():
                if lease.sender == sender and not lease.is_complete:
                    lease.lost_at = now

    def fail_lost(self, grace_s: float) -> tuple[list[str], float | None]:
        """Close leases whose sender has been gone for `grace_s`. Return them, and when to look again."""
        now, lost, next_at = time.monotonic(), [], None
        with self._lock:
            for lease in self._leases.values():
                if lease.lost_at is None or not lease.gate.is_open:
                    continue
                if now >= lease.lost_at + grace_s:
                    lost.append(lease)
                else:
                    next_at = min(next_at or lease.lost_at + grace_s, lease.lost_at + grace_s)
        for lease in lost:
            lease.gate.close()
        return [lease.lease_id for lease in lost], next_at

    def _emptied(self, lease_id: str) -> None:
        """React to the last writer's leaving a closed gate."""
        if self._unlease(lease_id):
            self._on_emptied(lease_id)

    def _unlease(self, lease_id: str) -> bool:
        """Return whether this call freed the closed lease's blocks."""
        with self._lock:
            lease = self._closing.pop(lease_id, None)
            if lease is not None:
                self._mark(lease, False)
            return lease is not None

    def _written(self, lease: Lease) -> BlockIndices:
        """Return the blocks that may be written to."""
        parts = [blocks[lease.spans[block_pool][0] :] for block_pool, blocks in lease.blocks.items()]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _mark(self, lease: Lease, leased: bool) -> None:
        self._leased[self._written(lease)] = leased


def _remember(leases: OrderedDict[str, None], lease_id: str) -> None:
    leases[lease_id] = None
    if len(leases) > REMEMBERED_LEASES:
        leases.popitem(last=False)
