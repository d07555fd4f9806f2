"""The `object_store` transport: blocks travel as objects of a store that both workers' hosts can reach.

The connection is an ordinary TCP one. Before the sender writes a piece's message to it, it copies the piece's
blocks into an object and sends the object's reference to the receiver's carrier, which puts the reference
into the connection's inbox. The receiver copies from the object into its pool. So the sender's blocks are not
read after the message is sent. The store holds at most `MAX_IN_FLIGHT` objects per pair, and one that is
being deleted.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from kvtransfer.blocks.extents import BlockIndices, Buffers, views
from kvtransfer.interface import RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, Channel, Hello
from kvtransfer.transports.transport import MAX_IN_FLIGHT, PieceReader, PieceWriter, Transport, tune
from protocol.errors import ProtocolError
from protocol.ids import Id

Reference: TypeAlias = Any
"""The name of an object in the store, which keeps it until every process has dropped the reference."""

SendObject: TypeAlias = Callable[[int, Sequence[memoryview]], None]
"""A function that stores a copy of the buffers and sends its numbered reference. Raises OSError."""

_SLICE_BYTES = 4 * 1024 * 1024
_LOOK_S = 0.25
"""Seconds between two checks of the connection while waiting for an object."""


class Inbox:
    """References that arrive for one connection in any order, and are taken in the order of their numbers."""

    def __init__(self) -> None:
        self.inbox_id = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._arrived: dict[int, Reference] = {}
        self._next = 0

    def put(self, number: int, reference: Reference) -> None:
        """Add a reference. Drop it if its number was taken or skipped already, or is too high."""
        with self._changed:
            if self._next <= number <= self._next + MAX_IN_FLIGHT:
                self._arrived[number] = reference
                self._changed.notify_all()

    def take(self, timeout_s: float) -> Reference | None:
        """Return the next reference, or None if it does not arrive in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._next in self._arrived, timeout_s):
                return None
            self._next += 1
            return self._arrived.pop(self._next - 1)

    def skip(self) -> None:
        with self._changed:
            self._arrived.pop(self._next, None)
            self._next += 1


class Inboxes:
    def __init__(self) -> None:
        self._open: dict[str, Inbox] = {}

    def open(self) -> Inbox:
        inbox = Inbox()
        self._open[inbox.inbox_id] = inbox
        return inbox

    def put(self, inbox_id: str, number: int, reference: Reference) -> None:
        inbox = self._open.get(inbox_id)
        if inbox is not None:
            inbox.put(number, reference)

    def close(self, inbox: Inbox) -> None:
        self._open.pop(inbox.inbox_id, None)


class Carrier(Protocol):
    """The interface that moves objects between workers (`deploy.ray_carrier`), for any thread."""

    address: str
    """The name by which other carriers reach this one."""
    inboxes: Inboxes
    """The inboxes for arriving references."""

    def sender_to(self, address: str, inbox_id: str) -> SendObject:
        """Return a function that sends objects. Raises OSError if there is no carrier at the address."""

    def get(self, reference: Reference, timeout_s: float) -> list[memoryview] | None:
        """Return the object's read-only buffers, or None after the timeout. Raises OSError if it is lost."""


class ObjectStoreWelcome(msgspec.Struct, frozen=True, tag="object-store"):
    """Receiver to sender, right after the handshake: the address for this connection's objects."""

    address: Id
    inbox_id: Id


class ObjectWriter(PieceWriter):
    def __init__(self, send: SendObject, pool: RegisteredPool) -> None:
        super().__init__(pool)
        self._send = send
        self._sent = 0

    def payload(self, buffer: memoryview, indices: BlockIndices) -> Buffers:
        if len(indices):
            self._send(self._sent, views(buffer, self.block_bytes, indices)[:])
            self._sent += 1
        return [memoryview(GOOD)]


class ObjectReader(PieceReader):
    def __init__(self, carrier: Carrier, channel: Channel, pool: RegisteredPool) -> None:
        self.inbox = carrier.inboxes.open()
        self._carrier = carrier
        self._channel = channel
        self._pool = pool

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        deadline = self._channel.progress_deadline()
        is_good = self._channel.recv_exact(len(GOOD), deadline) == GOOD
        if not len(targets):
            return is_good and gate.is_open
        if not is_good or not gate.is_open:
            self.inbox.skip()
            return False
        reference = self._await(self.inbox.take, deadline)
        blocks = self._await(lambda timeout_s: self._carrier.get(reference, timeout_s), deadline)
        if sum(map(len, blocks)) != len(targets) * self._pool.block_bytes:
            raise ProtocolError("a piece's object has another size than its blocks")
        memory = views(self._pool.buffer, self._pool.block_bytes, targets)
        return all(copy(source, target, gate) for source, target in aligned(blocks, memory))

    def close(self) -> None:
        self._carrier.inboxes.close(self.inbox)

    def _await(self, get: Callable[[float], Any], deadline: float) -> Any:
        """Return the first non-empty result of `get`.

        Raises ConnectionResetError if the sender has hung up, StoppedError if our own side is closing.
        """
        while (found := get(_LOOK_S)) is None:
            if self._channel.hung_up():
                raise ConnectionResetError("the sender hung up before its blocks were here")
            if time.monotonic() > deadline:
                raise TimeoutError("the object store made no progress in time")
        return found


def aligned(
    sources: Iterable[memoryview], targets: Iterable[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield the bytes of `sources` and `targets` in order, in pairs of equal, bounded length."""
    rest, next_source = memoryview(b""), iter(sources)
    for target in targets:
        while target:
            if not rest:
                rest = next(next_source)
                continue
            size = min(len(rest), len(target), _SLICE_BYTES)
            yield rest[:size], target[:size]
            rest, target = rest[size:], target[size:]


def copy(source: memoryview, target: memoryview, gate: WriteGate) -> bool:
    """Copy if the gate is open; return whether it was."""
    with gate.writing() as is_open:
        if is_open:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return is_open


class ObjectStoreTransport(Transport):
    """A transport through the object store. One per process. The caller owns the carrier."""

    name = "object_store"

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> ObjectWriter:
        welcome = channel.recv(ObjectStoreWelcome, deadline)
        return ObjectWriter(self._carrier.sender_to(welcome.address, welcome.inbox_id), pool)

    def reader(self, channel: Channel, target: RegisteredPool, hello: Hello, deadline: float) -> ObjectReader:
        tune(channel.socket)
        reader = ObjectReader(self._carrier, channel, target)
        try:
            channel.send(ObjectStoreWelcome(self._carrier.address, reader.inbox.inbox_id), deadline)
        except BaseException:
            reader.close()
            raise
        return reader
