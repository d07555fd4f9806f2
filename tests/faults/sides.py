"""Runs in a process of the harness: a pool with stamped free blocks, and one end of transfers."""

from __future__ import annotations

import collections
import gc
import logging
import os
import random
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

import kvtransfer.blocks.extents
from kvtransfer.blocks.extents import Mode
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Closed, Completed, Failed, Progress, RegisteredPool, Sent
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.transports.registry import TransportOptions, open_transports
from kvtransfer.transports.transport import Transport
from kvtransfer.transports.ucx import UcxTransport
from messaging.files import TlsFiles
from protocol.handoff import Extent
from protocol.ids import PeerAddress, new_incarnation
from tests.faults.carrier import DescriptorCarrier
from tests.faults.contents import SEGMENTS, Layout, pushed, received
from tests.faults.leftovers import at_rest, held, more_than
from tests.faults.network import enter
from tests.faults.points import RECEIVER_POINTS, SENDER_POINTS, Fault, FaultPoints
from tests.kvtransfer.ucx_tls import on_this_host

KEY = bytes(range(32))
CALL_BYTES = 64 * 1024
"""Bytes per system call, small enough to split a piece."""
SETTLE_S = 20.0
CLOSED_EARLY = "closed early"
LOG_LINES = 200

Outcome = tuple[Literal["completed", "failed", "expired", "corrupt"], str]


HASTY: dict[str, Any] = {"progress_timeout_s": 1.0, "connect_timeout_s": 1.0}


@dataclass(frozen=True)
class Options:
    """Options for one end. `listen_at` has addresses by transport; otherwise the transport chooses.

    The time-outs are so long that a busy machine never reaches them. `HASTY` is for faults that only a
    time-out can find.
    """

    worker_id: str
    transports: tuple[str, ...]
    checksum: Mode = TransportOptions.checksum
    streams: int = 1
    layout: Layout = "bytes"
    their_layout: Layout = "bytes"
    host: str = "127.0.0.1"
    listen_at: dict[str, str] = field(default_factory=dict)
    progress_timeout_s: float = 20.0
    connect_timeout_s: float = 20.0
    abort_timeout_s: float = 1.0
    reconnect_grace_s: float = 0.3
    retry_interval_s: float = 2.0
    certificates: TlsFiles | None = None
    """If set, `tcp` encrypts."""


class Blocks:
    """The pool's free blocks in random order, and their stamps."""

    def __init__(self, pool: RegisteredPool, stamp: int) -> None:
        self._pool = pool
        self._stamp = bytes([stamp]) * pool.block_bytes
        self._free: list[int] = []
        self._random = random.Random(stamp)
        self.give(range(pool.num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def view(self, block: int) -> memoryview:
        size = self._pool.block_bytes
        return self._pool.buffer[block * size : (block + 1) * size]

    def take(self, count: int) -> list[int]:
        self._random.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.view(block)[:] = self._stamp
            self._free.append(block)

    def spoiled(self) -> list[int]:
        """Return free blocks that somebody has written to."""
        return [block for block in self._free if self.view(block) != self._stamp]


class End(ABC):
    """The commands that both ends share. The test calls public methods."""

    def __init__(self, pool: RegisteredPool, stamp: int, options: Options) -> None:
        pool = replace(pool, segments=SEGMENTS[options.layout])
        self.options = options
        self.incarnation = new_incarnation()
        self.pool = pool
        self.blocks = Blocks(pool, stamp)
        self.carrier = DescriptorCarrier() if "object_store" in options.transports else None
        wire_options = TransportOptions(
            tcp_streams=options.streams, tls=options.certificates, carrier=self.carrier
        )
        self.wires = open_transports(options.transports, pool, self.incarnation, wire_options)
        for wire in self.wires:
            if wire.name in options.listen_at:
                _pin(wire, options.listen_at[wire.name])
        self.woken = threading.Event()
        self.outcomes: dict[str, Outcome] = {}
        self.end: Any = None

    def results(self, lease_ids: list[str], timeout_s: float) -> dict[str, Outcome]:
        """Return each lease's outcome. Gives up those that have none in time."""
        deadline = time.monotonic() + timeout_s
        while not all(lease_id in self.outcomes for lease_id in lease_ids):
            if not self._events(deadline):
                break
        for lease_id in lease_ids:
            if lease_id not in self.outcomes:
                self.give_up(lease_id)
                self.outcomes[lease_id] = "expired", "the request's deadline"
        return {lease_id: self.outcomes.pop(lease_id) for lease_id in lease_ids}

    @abstractmethod
    def give_up(self, lease_id: str) -> None:
        """Act as after the engine's deadline: release the lease, and its blocks as soon as that is safe."""

    @abstractmethod
    def cut(self) -> None:
        """Break every connection, as a failing network does."""

    def problems(self) -> list[str]:
        """Return what is wrong when no request is left."""
        deadline = time.monotonic() + SETTLE_S
        while self.blocks.num_free < self.pool.num_blocks and self._events(deadline):
            pass
        found = [f"block {block} was written to when it was free" for block in self.blocks.spoiled()]
        if self.blocks.num_free != self.pool.num_blocks:
            found.append(f"{self.pool.num_blocks - self.blocks.num_free} blocks are not free")
        if self.end.counters().get("failures_internal"):
            found.append("a defect ended a thread")
        if self.outcomes:
            found.append(f"nobody asked for {self.outcomes}")
        return found

    def counters(self) -> dict[str, float]:
        return dict(self.end.counters())

    def close(self) -> None:
        self.end.close()
        for wire in self.wires:
            wire.close()
        if self.carrier is not None:
            self.carrier.close()

    def _events(self, deadline: float) -> bool:
        """Handle events, after waiting for one if necessary. Return False if none came in time."""
        while not (events := self.end.poll()):
            if not self.woken.wait(max(0.0, deadline - time.monotonic())):
                return False
            self.woken.clear()
        for event in events:
            self._on_event(event)
        return True

    @abstractmethod
    def _on_event(self, event: Any) -> None: ...

    def _settle(self, lease_id: str, outcome: Outcome) -> None:
        assert lease_id not in self.outcomes, (
            f"{lease_id} ended as {self.outcomes[lease_id]} and as {outcome}"
        )
        self.outcomes[lease_id] = outcome


class SenderEnd(End):
    """A prefill worker's end: fills blocks, pushes them, and reuses them as soon as it may."""

    def __init__(self, pool: RegisteredPool, options: Options) -> None:
        super().__init__(pool, 0x5A, options)
        pool = self.pool
        self._sources: dict[str, list[int]] = {}
        self.end = self.sender = Sender(
            pool,
            key=KEY,
            worker_id=options.worker_id,
            incarnation=self.incarnation,
            transports=self.wires,
            on_event=self.woken.set,
            progress_timeout_s=options.progress_timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            abort_timeout_s=options.abort_timeout_s,
            retry_interval_s=options.retry_interval_s,
            checksum=options.checksum,
        )

    def push(
        self,
        peer: PeerAddress,
        lease_id: str,
        seed: int,
        chunks: list[int],
        first: int = 0,
        final: bool = True,
    ) -> None:
        """Push chunks of these numbers of blocks from position `first` on; `final` marks the last one."""
        for number, count in enumerate(chunks, 1):
            sources, size = self.blocks.take(count), self.pool.block_bytes
            assert len(sources) == count, "the sender's pool is full"
            for position, block in enumerate(sources, first):
                self.blocks.view(block)[:] = pushed(self.options.layout, seed, position, size)
            self._sources.setdefault(lease_id, []).extend(sources)
            num_tokens = (first + count) * self.pool.block_size
            extents, is_last = [Extent(0, sources)], final and number == len(chunks)
            self.sender.push(peer, lease_id, extents, first, num_tokens, final=is_last)
            first += count

    def await_sent(self, lease_id: str, blocks: int, timeout_s: float = SETTLE_S) -> None:
        """Wait until this number of the lease's blocks have arrived."""
        self._sent = 0
        deadline = time.monotonic() + timeout_s
        self._watched = lease_id
        while self._sent < blocks:
            assert self._events(deadline), f"{self._sent} of {blocks} blocks were sent"

    def give_up(self, lease_id: str) -> None:
        self.sender.abort(lease_id)
        self._free(lease_id)

    def abort(self, lease_id: str) -> None:
        """Abort the lease, as after a client's disconnect."""
        self.give_up(lease_id)
        self.outcomes[lease_id] = "expired", "aborted"

    def cut(self) -> None:
        for link in list(self.sender._links.values()):
            for stream in link._streams:
                if stream._channel is not None:
                    stream._channel.shutdown()

    def leave(self, addresses: list[str]) -> list[str]:
        """Wait until no link leads through these closed addresses. Return the links that still do."""
        deadline = time.monotonic() + SETTLE_S
        while (left := self._links_through(addresses)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def _links_through(self, addresses: list[str]) -> list[str]:
        """Return links through these addresses; one that is still connecting counts with all candidates."""
        found = []
        for link in list(self.sender._links.values()):
            ways = [link._active] if link._active is not None and link.connected else link._candidates
            if any(way.offer.address in addresses for way in ways):
                found.append(f"the link to {link.peer.worker_id} leads through a proxy that is gone")
        return found

    def problems(self) -> list[str]:
        found = super().problems()
        if self.sender._leases:
            found.append(f"the sender holds leases {list(self.sender._leases)}")
        deadline = time.monotonic() + SETTLE_S
        while (busy := self._busy_links()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found + [f"the link to {peer} is not idle" for peer in busy]

    def _busy_links(self) -> list[str]:
        """Return the peers of busy links. The receiver acknowledges even aborted pieces."""
        return [
            link.peer.worker_id
            for link in list(self.sender._links.values())
            if link._queue or link._refused or link._reporting or any(s.in_flight for s in link._streams)
        ]

    def _on_event(self, event: Sent | Completed | Failed) -> None:
        match event:
            case Sent() if event.lease_id == getattr(self, "_watched", None):
                self._sent = event.blocks
            case Completed():
                self._free(event.lease_id)
                self._settle(event.lease_id, ("completed", event.transport))
            case Failed():
                self.sender.abort(event.lease_id)
                self._free(event.lease_id)
                self._settle(event.lease_id, ("failed", event.reason))

    def _free(self, lease_id: str) -> None:
        self.blocks.give(self._sources.pop(lease_id, []))


@dataclass
class _Reservation:
    seed: int
    blocks: list[int]
    outcome: Outcome | None = None


class ReceiverEnd(End):
    """A decode worker's end: reserves blocks, checks arriving bytes, reuses blocks of closed leases."""

    def __init__(self, pool: RegisteredPool, options: Options) -> None:
        super().__init__(pool, 0xA5, options)
        pool = self.pool
        self._reservations: dict[str, _Reservation] = {}
        self.end = self.receiver = Receiver(
            pool,
            key=KEY,
            worker_id=options.worker_id,
            incarnation=self.incarnation,
            transports=self.wires,
            host=options.host,
            on_event=self.woken.set,
            progress_timeout_s=options.progress_timeout_s,
            handshake_timeout_s=options.connect_timeout_s,
            reconnect_grace_s=options.reconnect_grace_s,
        )

    def peer(self) -> PeerAddress:
        return PeerAddress(
            worker_id=self.options.worker_id,
            incarnation=self.incarnation,
            control="-",
            offers=self.receiver.offers,
        )

    def reserve(self, lease_id: str, seed: int, count: int) -> str:
        """Open a lease for this number of blocks. Return why it was refused, or an empty string."""
        if count > self.blocks.num_free:
            return f"no room for {count} blocks, {self.blocks.num_free} are free"
        blocks = self.blocks.take(count)
        self._reservations[lease_id] = _Reservation(seed, blocks)
        self.receiver.open(lease_id, [Extent(0, blocks)])
        return ""

    def give_up(self, lease_id: str) -> None:
        if self._is_open(lease_id):
            self._close(lease_id, ("expired", "the request's deadline"))

    def expire(self, lease_id: str) -> None:
        """Close a lease before its deadline."""
        self._close(lease_id, ("expired", CLOSED_EARLY))

    def await_connections(self, count: int) -> None:
        """Wait until no more than `count` connections are open."""
        deadline = time.monotonic() + SETTLE_S
        while sum(connection.is_alive() for connection in self.receiver._connections) > count:
            assert time.monotonic() < deadline, "a connection does not end"
            time.sleep(0.001)

    def cut(self) -> None:
        for connection in self.receiver._connections:
            connection._channel.shutdown()

    def problems(self) -> list[str]:
        found = super().problems()
        table = self.receiver._leases
        if table._leases or table._closing or any(leased.any() for leased in table._leased):
            found.append(f"the receiver holds leases {[*table._leases, *table._closing]}")
        if any(len(wire._orphans) for wire in self.wires if isinstance(wire, UcxTransport)):
            found.append("a read was given up and is not over")
        return found

    def _on_event(self, event: Progress | Failed | Closed) -> None:
        match event:
            case Closed():
                self._over(event.lease_id)
            case Failed() if self._is_open(event.lease_id):
                self._close(event.lease_id, ("failed", event.reason))
            case Progress() if event.complete and self._is_open(event.lease_id):
                self._close(event.lease_id, self._examined(event.lease_id))

    def _is_open(self, lease_id: str) -> bool:
        """Tell whether a lease is open, after handling the events that came before it was closed."""
        reservation = self._reservations.get(lease_id)
        return reservation is not None and reservation.outcome is None

    def _examined(self, lease_id: str) -> Outcome:
        reservation, size = self._reservations[lease_id], self.pool.block_bytes
        layouts = self.options.their_layout, self.options.layout
        wrong = [
            position
            for position, block in enumerate(reservation.blocks)
            if self.blocks.view(block) != received(*layouts, reservation.seed, position, size)
        ]
        return ("corrupt", f"at positions {wrong}") if wrong else ("completed", "")

    def _close(self, lease_id: str, outcome: Outcome) -> None:
        reservation = self._reservations[lease_id]
        assert reservation.outcome is None, f"{lease_id} ended as {reservation.outcome} and as {outcome}"
        reservation.outcome = outcome
        self._settle(lease_id, outcome)
        if self.receiver.close_lease(lease_id):
            self._over(lease_id)

    def _over(self, lease_id: str) -> None:
        self.blocks.give(self._reservations.pop(lease_id).blocks)


class Process:
    """The process as the test controls it: it opens one end after another over the same pool."""

    def __init__(self, num_blocks: int, block_bytes: int, report: Connection) -> None:
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        handler = logging.Handler()
        handler.emit = lambda record: self._log.append(
            f"{record.relativeCreated:.0f} {record.threadName}: {logging.Formatter().format(record)}"
        )
        logging.basicConfig(level=logging.DEBUG, handlers=[handler], force=True)
        kvtransfer.blocks.extents.BATCH_BYTES = CALL_BYTES
        self._memory = PoolMemory(num_blocks * block_bytes)
        self._pool = RegisteredPool(self._memory.buffer, block_bytes, num_blocks, memory_fd=self._memory.fd)
        self._points = FaultPoints(SENDER_POINTS, report, self._cut)
        self._more_points = FaultPoints(RECEIVER_POINTS, report, self._cut)
        self.end: SenderEnd | ReceiverEnd | None = None
        self._before = held()
        self._idle = self._before

    def open(self, role: Literal["sender", "receiver"], options: Options) -> PeerAddress | None:
        assert self.end is None
        self.arm([])
        kind = SenderEnd if role == "sender" else ReceiverEnd
        self.end = kind(self._pool, options)
        self._idle = at_rest() if "ucx" in options.transports else held()
        return self.end.peer() if isinstance(self.end, ReceiverEnd) else None

    def shut(self) -> dict[str, int]:
        """Close the end and return its leftovers."""
        assert self.end is not None
        self.arm([])
        self.end.close()
        self.end = None
        return self._settled(self._before)

    def left(self) -> dict[str, int]:
        """Return what the end holds beyond its state after opening, once its peers are gone."""
        return self._settled(self._idle)

    def arm(self, faults: list[Fault]) -> None:
        self._points.arm(faults)
        self._more_points.arm(faults)

    def log(self) -> list[str]:
        return list(self._log)

    def _cut(self) -> None:
        assert self.end is not None
        self.end.cut()

    @staticmethod
    def _settled(before: dict[str, int]) -> dict[str, int]:
        """Return the leftovers after a short wait: threads and descriptors end a moment after their cause."""
        deadline = time.monotonic() + SETTLE_S
        while (extra := more_than(before)) and time.monotonic() < deadline:
            time.sleep(0.002)
        return extra


def _pin(wire: Transport, address: str) -> None:
    """Make a transport listen at a given address, such as a predecessor's."""

    def listen(host: str, ports: Sequence[int]) -> tuple[socket.socket, str]:
        if wire.name == "shm":
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind("\0" + address)
            listener.listen(128)
        else:
            name, _, port = address.rpartition(":")
            listener = socket.create_server((name, int(port)), backlog=128)
            return listener, "{}:{}".format(*listener.getsockname())
        return listener, address

    wire.listen = listen


def serve(
    commands: Connection, report: Connection, num_blocks: int, block_bytes: int, network: str, tls: str
) -> None:
    """Answer commands, which are methods of the open end or of the process."""
    gc.freeze()  # the fork server's imports, which would make every collection slow
    enter(network)
    os.environ["UCX_TLS"] = on_this_host(tls)
    process = Process(num_blocks, block_bytes, report)
    commands.send((True, None))
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:
            return
        try:
            owner = process if hasattr(Process, name) else process.end
            commands.send((True, getattr(owner, name)(*arguments)))
        except Exception:
            commands.send((False, traceback.format_exc()))
