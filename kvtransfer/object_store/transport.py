"""Pieces as objects in a store that both workers' hosts can reach, for workers that can't reach each other.

A piece's blocks are copied into the store when its turn comes; the reference travels beside the piece's
message, and the receiver copies from the store into its pool. So a sender's blocks are not read any more
once the piece is on its way. The store holds at most `MAX_IN_FLIGHT` pieces of a pair, and one that is
leaving.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence

import numpy as np

from kvtransfer.channel import Channel
from kvtransfer.extents import BlockIndices, Blocks, views
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases import WriteGate
from kvtransfer.messages import Hello
from kvtransfer.object_store.carrier import Carrier, Reference
from kvtransfer.object_store.lines import Line, LineListener, Lines
from kvtransfer.tcp import GOOD
from protocol.errors import ProtocolError

_SLICE_BYTES = 4 * 1024 * 1024
_LOOK_S = 0.25
"""How often the connection is looked at while an object is on its way."""


class ObjectWriter:
    remote_reads = False
    packed = None

    def __init__(self, lines: Lines, line: Line, carrier: Carrier, pool: RegisteredPool) -> None:
        self._lines = lines
        self._line = line
        self._carrier = carrier
        self._pool = pool

    def payload(self, blocks: Blocks, num_tokens: int) -> list[memoryview]:
        if blocks.size:
            memory = views(self._pool.buffer, self._pool.block_bytes, blocks[0])
            self._lines.send_object(self._line, self._carrier.put(memory))
        return [memoryview(GOOD)]

    def close(self) -> None:
        self._lines.forget_objects(self._line)


class ObjectReader:
    def __init__(
        self,
        lines: Lines,
        line: Line,
        carrier: Carrier,
        channel: Channel,
        pool: RegisteredPool,
        progress_timeout_s: float,
    ) -> None:
        self._lines = lines
        self._line = line
        self._carrier = carrier
        self._channel = channel
        self._pool = pool
        self._progress_timeout_s = progress_timeout_s

    def read(self, sources: BlockIndices, targets: BlockIndices, gate: WriteGate | None) -> bool:
        deadline = time.monotonic() + self._progress_timeout_s
        is_good = self._channel.recv_exact(len(GOOD), deadline) == GOOD
        if not len(targets):
            return is_good and gate is not None
        reference = self._lines.take_object(self._line)
        if gate is None or not is_good:
            return False
        self._await(reference, deadline)
        blocks = self._carrier.get(reference)
        if sum(map(len, blocks)) != len(targets) * self._pool.block_bytes:
            raise ProtocolError("a piece's object has another size than its blocks")
        memory = views(self._pool.buffer, self._pool.block_bytes, targets)
        return all(copy(source, target, gate) for source, target in aligned(blocks, memory))

    def close(self) -> None:
        self._lines.forget_objects(self._line)

    def _await(self, reference: Reference, deadline: float) -> None:
        """Raises ConnectionResetError if the sender has hung up, StoppedError if our own side is closing."""
        while not self._carrier.is_here(reference, _LOOK_S):
            try:
                hung_up = self._channel.wait(select.POLLRDHUP, time.monotonic())
            except TimeoutError:
                hung_up = 0
            if hung_up:
                raise ConnectionResetError("the sender hung up before its blocks were here")
            if time.monotonic() > deadline:
                raise TimeoutError("the object store made no progress in time")


def aligned(
    sources: Sequence[memoryview], targets: Sequence[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """The bytes of `sources` in order beside those of `targets`, in pairs of equal and bounded length."""
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
    """If the gate is open; whether it is."""
    with gate.writing() as is_open:
        if is_open:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return is_open


class ObjectStoreTransport:
    """One per process. The caller owns the carrier."""

    name = "object_store"
    same_host = False
    reaches_devices = False
    streams = 1
    parts_at_once = 1
    wire_dtype = "auto"

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._lines = Lines(carrier)

    def listen(self, host: str) -> tuple[LineListener, str]:
        return self._lines.listen(), self._carrier.address

    def connect(self, address: str) -> socket.socket:
        return self._lines.open(address)

    def writer(self, channel: Channel, pool: RegisteredPool, deadline: float) -> ObjectWriter:
        return ObjectWriter(self._lines, self._lines.line_of(channel.socket), self._carrier, pool)

    def reader(
        self,
        channel: Channel,
        target: RegisteredPool,
        hello: Hello,
        deadline: float,
        progress_timeout_s: float,
    ) -> ObjectReader:
        line = self._lines.line_of(channel.socket)
        return ObjectReader(self._lines, line, self._carrier, channel, target, progress_timeout_s)

    def close(self) -> None:
        self._lines.close()
