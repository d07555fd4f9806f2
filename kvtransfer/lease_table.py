"""All leases of one receiver."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kvtransfer.blocks.device import PAST, Mark
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.interface import Arrival
from kvtransfer.lease import Lease, PieceArrival, WriteGate
from kvtransfer.messages import UNKNOWN_LEASE, Piece
from protocol.handoff import Extent

REMEMBERED_LEASES = 4096
"""Completed leases whose ids are kept. Their pieces may come again after a lost ack, which is no error."""


class LeaseTable:
    """All leases of one receiver, for use from every thread. A block belongs to at most one of them."""

    def __init__(
        self, block_pools: Sequence[int], block_size: int, on_emptied: Callable[[str], None]
    ) -> None:
        """`block_pools` are the numbers of blocks of each block pool, all over the same blocks."""
        self._block_size = block_size
        self._on_emptied = on_emptied
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._closing: dict[str, Lease] = {}
        self._completed: OrderedDict[str, None] = OrderedDict()
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
        after: Mark = PAST,
    ) -> None:
        """Allow writes `after` this mark. Raises ValueError for a known lease or unfit blocks."""
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
        """Begin no write under the lease after this. Return whether its blocks are free now. Idempotent.

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

    def admit(self, piece: Piece, positions: BlockIndices, sender: str) -> tuple[Lease | None, str]:
        """Return the lease to write under, or None with the reason, "" if the piece came before."""
        with self._lock:
            if piece.lease_id in self._completed:
                return None, ""
            lease = self._leases.get(piece.lease_id)
            if lease is None or not lease.gate.is_open:
                return None, UNKNOWN_LEASE
            refusal = lease.refusal(piece.block_pool, positions, sender)
            return (None, refusal) if refusal else (lease, "")

    def record(
        self, lease: Lease, piece: Piece, positions: BlockIndices, arrival: PieceArrival
    ) -> tuple[int, Arrival | None]:
        """Record a piece. Return the number of blocks in place, and at the end the lease's arrival."""
        with self._lock:
            lease.arrivals.add(piece, arrival)
            received = lease.record(piece, positions)
            return received, lease.arrivals.arrival() if lease.is_complete else None

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
        """Close leases whose sender is gone for `grace_s`. Return them, and when to look again."""
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
        """React to the last writer's leaving of a closed gate."""
        if self._unlease(lease_id):
            self._on_emptied(lease_id)

    def _unlease(self, lease_id: str) -> bool:
        """Return whether this call made the closed lease's blocks free."""
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
