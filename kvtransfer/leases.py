"""Leases of the receiver: which blocks may be written, under which name, and by whom."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.extents import BlockIndices
from kvtransfer.interface import Arrival
from kvtransfer.messages import OTHER_SENDER, OUTSIDE, OVERTAKEN, STILL_WRITTEN, UNKNOWN_LEASE, Piece
from kvtransfer.pieces import ArrivalRecord, PieceArrival

REMEMBERED_LEASES = 4096
"""Completed leases whose names are kept: a piece that is sent again because its ack was lost is no error."""


class WriteGate:
    """Lets writers in until it is closed, and knows when the last one has left.

    One `within` another lets nobody in whom that one does not.
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
        """Whether the caller may write now; if so it must `leave` afterwards."""
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
        """Around one bounded write; yields whether it is allowed."""
        allowed = self.enter()
        try:
            yield allowed
        finally:
            if allowed:
                self.leave()

    def close(self) -> bool:
        """No write begins after this. Whether none is under way either; if not, `on_empty` tells."""
        with self._state:
            self._open = False
            return not self._writers

    def wait_empty(self, deadline: float) -> bool:
        """Whether the last writer leaves by then (monotonic seconds)."""
        with self._state:
            return self._state.wait_for(lambda: not self._writers, max(0.0, deadline - time.monotonic()))


@dataclass(slots=True)
class _Attempts:
    """At one part: the number of the latest, and the gates of those that may still be writing."""

    number: int = -1
    gates: list[WriteGate] = field(default_factory=list)


class Lease:
    """Blocks of one prompt, in order, and what has come of them.

    Only tokens in [`first_token`, `num_tokens`) are written: those before are cached, and maybe shared. A
    *position* is the index of one of the sender's blocks within the prompt.
    """

    def __init__(
        self, lease_id: str, blocks: BlockIndices, first_token: int, num_tokens: int, gate: WriteGate
    ) -> None:
        self.lease_id = lease_id
        self.blocks = blocks
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.gate = gate
        self.sender: str | None = None
        self.lost_at: float | None = None
        self.arrivals = ArrivalRecord()
        self._source_block_size = 0
        self._received = np.zeros(0, dtype=bool)
        self._first_position = 0
        self._parts: set[int] = set()
        self._attempts_lock = threading.Lock()
        self._attempts: defaultdict[int, _Attempts] = defaultdict(_Attempts)
        self._num_parts: int | None = None

    @property
    def is_complete(self) -> bool:
        """Every part has come, the final one among them."""
        return len(self._parts) == self._num_parts

    def refusal(self, positions: BlockIndices, sender: str, source_block_size: int) -> str:
        """Why these positions may not come from this sender; empty if they may."""
        if self.sender is None:
            self._begin(sender, source_block_size)
        if (sender, source_block_size) != (self.sender, self._source_block_size):
            return OTHER_SENDER
        inside = positions - self._first_position
        if len(inside) and (inside.min() < 0 or inside.max() >= len(self._received)):
            return OUTSIDE
        return ""

    def attempt(self, piece: Piece, deadline: float) -> tuple[WriteGate | None, str]:
        """The gate for one more attempt at a piece, behind which no earlier one at its parts writes any more.

        An earlier one, whose wire the sender gave up, may still be reading what the sender has since reused.
        None with the reason if it does not come to its end by the deadline, or is itself what comes too late.
        """
        gate = WriteGate(within=self.gate)
        earlier = []
        with self._attempts_lock:
            attempts = [self._attempts[index] for index in piece.part_indices]
            if any(other.number >= piece.attempt for other in attempts):
                return None, OVERTAKEN
            for other in attempts:
                other.number = piece.attempt
                writing = [each for each in other.gates if not each.close()]
                other.gates = [*writing, gate]
                earlier += writing
        is_alone = all(other.wait_empty(deadline) for other in earlier)
        return (gate, "") if is_alone else (None, STILL_WRITTEN)

    def record(self, piece: Piece, positions: BlockIndices) -> int:
        """Note that a piece is in place; returns how many of the sender's blocks are."""
        self._received[positions - self._first_position] = True
        self._parts.update(piece.part_indices)
        if piece.final:
            self._num_parts = piece.part_indices.stop
        return int(self._received.sum())

    def _begin(self, sender: str, source_block_size: int) -> None:
        self.sender = sender
        self._source_block_size = source_block_size
        self._first_position = self.first_token // source_block_size
        end = -(-self.num_tokens // source_block_size)
        self._received = np.zeros(max(0, end - self._first_position), dtype=bool)


class LeaseTable:
    """All leases of one receiver, for use from every thread. A block belongs to at most one of them."""

    def __init__(self, num_blocks: int, block_size: int, on_emptied: Callable[[str], None]) -> None:
        self._block_size = block_size
        self._on_emptied = on_emptied
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._closing: dict[str, Lease] = {}
        self._completed: OrderedDict[str, None] = OrderedDict()
        self._leased = np.zeros(num_blocks, dtype=bool)
        self._connections: Counter[str] = Counter()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    @property
    def num_closing(self) -> int:
        """Closed leases whose blocks are still being written to."""
        return len(self._closing)

    def open(
        self, lease_id: str, block_ids: Sequence[int], first_block: int = 0, num_tokens: int | None = None
    ) -> None:
        """Raises ValueError for a known lease, or blocks that are not there or leased."""
        blocks = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        written = blocks[first_block:]
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < len(self._leased)):
            raise ValueError(f"block_ids of lease {lease_id} must be in [0, {len(self._leased)})")
        capacity = len(blocks) * self._block_size
        end = capacity if num_tokens is None else num_tokens
        if end > capacity:
            raise ValueError(f"num_tokens of lease {lease_id} is {end}, its blocks hold {capacity}")
        gate = WriteGate(lambda: self._emptied(lease_id))
        lease = Lease(lease_id, blocks, first_block * self._block_size, end, gate)
        with self._lock:
            if lease_id in self._leases or lease_id in self._closing:
                raise ValueError(f"lease {lease_id} is open already")
            if self._leased[written].any() or len(np.unique(written)) < len(written):
                raise ValueError(
                    f"block_ids of lease {lease_id} include some twice, or of another open lease"
                )
            self._leased[written] = True
            self._leases[lease_id] = lease

    def close(self, lease_id: str) -> bool:
        """No write begins under the lease after this; idempotent. Whether its blocks are free at once.

        If not, `on_emptied` is called when they are.
        """
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                return lease_id not in self._closing
            if lease.is_complete:
                self._remember(lease_id)
            self._closing[lease_id] = lease
        return lease.gate.close() and self._unlease(lease_id)

    def close_all(self) -> None:
        for lease_id in list(self._leases):
            self.close(lease_id)

    def admit(
        self, piece: Piece, positions: BlockIndices, sender: str, source_block_size: int
    ) -> tuple[Lease | None, str]:
        """The lease that the piece may be written under; None with why not, or with "" if it came before."""
        with self._lock:
            if piece.lease_id in self._completed:
                return None, ""
            lease = self._leases.get(piece.lease_id)
            if lease is None or not lease.gate.is_open:
                return None, UNKNOWN_LEASE
            refusal = lease.refusal(positions, sender, source_block_size)
            return (None, refusal) if refusal else (lease, "")

    def record(
        self, lease: Lease, piece: Piece, positions: BlockIndices, arrival: PieceArrival
    ) -> tuple[int, Arrival | None]:
        """Note that the piece is in place.

        Returns how many of the sender's blocks are, and after the last piece how they came.
        """
        with self._lock:
            lease.arrivals.add(piece, arrival)
            received = lease.record(piece, positions)
            return received, lease.arrivals.arrival() if lease.is_complete else None

    def connected(self, sender: str) -> None:
        """One more connection from this sender."""
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
        """End the leases whose sender has been gone for so long. Returns them, and when to look again."""
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

    def _remember(self, lease_id: str) -> None:
        self._completed[lease_id] = None
        if len(self._completed) > REMEMBERED_LEASES:
            self._completed.popitem(last=False)

    def _emptied(self, lease_id: str) -> None:
        """The last writer has left a closed gate."""
        if self._unlease(lease_id):
            self._on_emptied(lease_id)

    def _unlease(self, lease_id: str) -> bool:
        """Whether this call is the one that made the closed lease's blocks free."""
        with self._lock:
            lease = self._closing.pop(lease_id, None)
            if lease is not None:
                self._leased[lease.blocks[lease.first_token // self._block_size :]] = False
            return lease is not None
