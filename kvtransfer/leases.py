"""Leases of the receiver: which blocks may be written, under which name, and until when."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvtransfer.messages import Piece


class Lease:
    """Some blocks that may be written. Whoever writes holds `lock` and has seen `open` true under it.

    The lock is held for one bounded copy at a time, so that closing waits for no peer.
    """

    def __init__(self, lease_id: str, block_ids: Sequence[int]) -> None:
        self.lease_id = lease_id
        self.lock = threading.Lock()
        self.open = True
        self.complete = False
        self.writer: object | None = None
        self._blocks = frozenset(block_ids)
        self._received: set[int] = set()

    def covers(self, piece: Piece) -> bool:
        return all(self._blocks.issuperset(range(target, target + count)) for _, target, count in piece.runs)

    def record(self, piece: Piece) -> int:
        """Note a piece that is in place; returns how many distinct blocks are."""
        for _, target, count in piece.runs:
            self._received.update(range(target, target + count))
        self.complete = self.complete or piece.final
        return len(self._received)


class LeaseTable:
    """All leases of one receiver, for use from every thread."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def open(self, lease_id: str, block_ids: Sequence[int]) -> None:
        if not all(0 <= block_id < self._num_blocks for block_id in block_ids):
            raise ValueError(f"block_ids of lease {lease_id} must be in [0, {self._num_blocks})")
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id} is open already")
            self._leases[lease_id] = Lease(lease_id, block_ids)

    def close(self, lease_id: str) -> None:
        """After this returns nothing is written under the lease any more. Idempotent."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
        if lease is not None:
            with lease.lock:
                lease.open = False

    def close_all(self) -> None:
        for lease_id in list(self._leases):
            self.close(lease_id)

    def admit(self, piece: Piece, writer: object) -> tuple[Lease | None, str]:
        """The lease that the piece may be written under, or None and the reason."""
        with self._lock:
            lease = self._leases.get(piece.lease_id)
        if lease is None or not lease.open:
            return None, "unknown lease"
        if not lease.covers(piece):
            return None, "blocks outside of the lease"
        lease.writer = writer
        return lease, ""

    def fail_written_by(self, writer: object) -> list[str]:
        """Close the writer's incomplete leases for good, and name them."""
        with self._lock:
            lost = [lease for lease in self._leases.values() if lease.writer is writer and not lease.complete]
        failed = []
        for lease in lost:
            with lease.lock:
                if lease.open:
                    lease.open = False
                    failed.append(lease.lease_id)
        return failed
