"""The parts of a worker, created once and passed to its loop: counters, and both ends of its transfers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq

from engine.engine import Engine
from kvtransfer.interface import RegisteredPool
from kvtransfer.pairs import Pairs
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.transport import Transport
from messaging.sockets import ClusterKeys
from messaging.wake import Wake
from protocol.config import ServeConfig
from protocol.metrics import WORKER_COUNTERS
from protocol.ports import worker_ports
from protocol.roles import RoleSpec
from protocol.worker_to_router import WorkerState
from speculation.remote import RemoteDrafter
from worker.cores import SharedCores
from worker.kv_publisher import KvPublisher


class Counters:
    """Counters that the loop's thread and its helpers write and the heartbeat's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys((metric.name for metric in WORKER_COUNTERS), 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)

    def __getitem__(self, name: str) -> float:
        return self._values[name]


class LoopProgress:
    """The loop's progress, which the loop's thread writes and the heartbeat's thread reads."""

    def __init__(self) -> None:
        self.turns = 0
        """Number of turns that have begun."""
        self.thread: int | None = None
        """The loop's thread, or None while no loop runs."""
        self._clock = 0

    def begin(self) -> None:
        """Note that the calling thread runs the loop from now on."""
        self.turns += 1
        self.thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self.thread)

    def end(self) -> None:
        self.thread = None

    def core_s(self) -> float:
        """Return the CPU time that the loop's thread has used; 0 while no loop runs."""
        try:
            return time.clock_gettime(self._clock) if self.thread is not None else 0.0
        except OSError:  # the thread has just ended
            return 0.0


@dataclass(eq=False)
class WorkerParts:
    """The objects that the loop, the heartbeat and the transfers of one worker process share.

    `host` is the address that the worker's own sockets bind. `wires` are the open transports, best first.
    `transports` returns the transports in use, by the peer's worker id; the heartbeat's thread calls it and
    `transfer_counters`. `pairs` counts the transfers between this worker and each peer.
    """

    config: ServeConfig
    role: RoleSpec
    worker_id: str
    incarnation: str
    host: str
    keys: ClusterKeys
    context: zmq.Context[zmq.Socket[bytes]]
    wake: Wake = field(default_factory=Wake)
    counters: Counters = field(default_factory=Counters)
    progress: LoopProgress = field(default_factory=LoopProgress)
    wires: list[Transport] = field(default_factory=list)
    transports: Callable[[], dict[str, str]] = dict
    transfer_counters: Callable[[], dict[str, float]] = dict
    pairs: Pairs = field(default_factory=Pairs)
    engine: Engine | None = None
    pool: RegisteredPool | None = None
    kv_publisher: KvPublisher | None = None
    cores: SharedCores | None = None
    """The worker's shared cores, or None if the number of threads is fixed."""
    remote_drafts: RemoteDrafter | None = None
    """The drafts that draft workers make for the engine; None without draft workers."""
    num_kv_events: int = 0
    """Number of KV event batches that this incarnation has sent to the router."""

    def begin_anew(self, role: RoleSpec, incarnation: str) -> None:
        """Become another incarnation. A concurrent heartbeat reports too few events rather than too many."""
        self.num_kv_events = 0
        self.role, self.incarnation = role, incarnation

    @property
    def ids(self) -> dict[str, Any]:
        """The fields that name the sender of a message to the router."""
        return {"worker_id": self.worker_id, "incarnation": self.incarnation}

    @property
    def reports_cache(self) -> bool:
        """Whether others learn the prefix cache's contents; False on a worker that holds the draft model."""
        return self.config.enable_prefix_caching and not self.role.holds_draft

    def state(self) -> WorkerState:
        """Return the heartbeat's content; needs an engine. The heartbeat's thread calls this."""
        assert self.engine is not None
        transfers = {f"kv_{name}_total": value for name, value in self.transfer_counters().items()}
        transports = self.transports()
        return WorkerState(
            **self.ids,
            role=self.role.name,
            num_kv_events=self.num_kv_events,
            counters=self.counters.snapshot() | transfers | self.engine.counters(),
            transports=transports,
            pairs=self.pairs.snapshot(transports),
            speculation=self.engine.speculation(),
            costs=self.engine.times.costs(),
            **asdict(self.engine.stats()),
        )


def open_transfers(parts: WorkerParts) -> tuple[Sender, Receiver]:
    """Open the sender and the receiver, which wake the loop for their events."""
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
