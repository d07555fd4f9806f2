"""Opens a worker's sender and receiver of KV, on its open transports."""

from __future__ import annotations

from collections import Counter

from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from protocol.ports import worker_ports
from worker.parts import WorkerParts


def open_transfers(parts: WorkerParts) -> tuple[Sender, Receiver]:
    """Open the sender and the receiver. Both wake the loop when they have events; the heartbeat sends their
    counters.
    """
    assert parts.pool is not None
    sender = Sender(
        parts.pool,
        key=parts.keys.transfer_key,
        worker_id=parts.worker_id,
        incarnation=parts.incarnation,
        transports=parts.wires,
        checksum=parts.config.kv_checksum,
        pairs=parts.pairs,
        on_event=parts.wake.set,
    )
    receiver = Receiver(
        parts.pool,
        key=parts.keys.transfer_key,
        worker_id=parts.worker_id,
        incarnation=parts.incarnation,
        transports=parts.wires,
        host=parts.host,
        ports=worker_ports(parts.config),
        pairs=parts.pairs,
        on_event=parts.wake.set,
    )
    parts.transports = sender.transports

    def counters() -> dict[str, float]:
        total = Counter(sender.counters())
        total.update(receiver.counters())
        return dict(total)

    parts.transfer_counters = counters
    return sender, receiver
