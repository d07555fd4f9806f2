"""Leases of the receiver: which blocks may be written, under which name, and until when."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from kvtransfer.extents import BlockIndices

_FREE = 0


class Lease:
    """Some blocks that may be written. Whoever writes holds `lock` and has seen `open` true under it.

    The lock is held for one bounded copy at a time, so that closing waits for no peer.
    """

    def __init__(self, lease_id: str, number: int, blocks: BlockIndices) -> None:
        self.lease_id = lease_id
        self.number = number
        self.blocks = blocks
        self.lock = threading.Lock()
        self.open = True
        self.complete = False
        self.writer: object | None = None

    def end(self) -> bool:
        """No write after this. Whether it was open until now."""
        with self.lock:
            was_open, self.open = self.open, False
        return was_open


class LeaseTable:
    """All leases of one receiver, for use from every thread. A block belongs to at most one of them."""

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._owner = np.zeros(num_blocks, dtype=np.int64)
        self._received = np.zeros(num_blocks, dtype=bool)
        self._last_number = _FREE

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    def open(self, lease_id: str, block_ids: Sequence[int]) -> None:
        blocks = np.asarray(block_ids, dtype=np.int64).reshape(-1)
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < len(self._owner)):
            raise ValueError(f"block_ids of lease {lease_id} must be in [0, {len(self._owner)})")
        with self._lock:
            if lease_id in self._leases:
                raise ValueError(f"lease {lease_id} is open already")
            if (self._owner[blocks] != _FREE).any():
                raise ValueError(f"block_ids of lease {lease_id} include some of another open lease")
            self._last_number += 1
            self._owner[blocks] = self._last_number
            self._received[blocks] = False
            self._leases[lease_id] = Lease(lease_id, self._last_number, blocks)

    def close(self, lease_id: str) -> None:
        """After this returns nothing is written under the lease any more. Idempotent."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                lease.end()
                self._owner[lease.blocks] = _FREE

    def close_all(self) -> None:
        for lease_id in list(self._leases):
            self.close(lease_id)

    def admit(self, lease_id: str, targets: BlockIndices, writer: object) -> tuple[Lease | None, str]:
        """The lease under which these blocks may be written, or None and the reason."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or not lease.open:
                return None, "unknown lease"
            inside = not len(targets) or targets.max() < len(self._owner)
            if not inside or (self._owner[targets] != lease.number).any():
                return None, "blocks outside of the lease"
            lease.writer = writer
        return lease, ""

    def record(self, lease: Lease, targets: BlockIndices, final: bool) -> int:
        """Note that these blocks are in place; returns how many of the lease are. Nothing if it is closed."""
        with self._lock:
            if not lease.open:
                return 0
            self._received[targets] = True
            lease.complete = lease.complete or final
            return int(self._received[lease.blocks].sum())

    def fail_written_by(self, writer: object) -> list[str]:
        """End the writer's incomplete leases, and name them."""
        with self._lock:
            lost = [lease for lease in self._leases.values() if lease.writer is writer and not lease.complete]
        return [lease.lease_id for lease in lost if lease.end()]
