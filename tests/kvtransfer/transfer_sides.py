"""Both ends of a transfer for tests: pools with known content, waits for events, raw peers."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from kvtransfer.blocks.extents import Mode
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Completed, Failed, Progress, RegisteredPool
from kvtransfer.messages import Ack, Channel, Piece
from kvtransfer.pairs import Pairs
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.streams.handshake import Identity, examine, introduce
from kvtransfer.transports.registry import TransportOptions, open_transports
from kvtransfer.transports.transport import Transport, host_id
from messaging.wake import Wake
from protocol.handoff import Extent
from protocol.ids import PeerAddress, TransferOffer, new_incarnation

KEY = bytes(range(32))
WAIT_S = 20.0
PLAIN = TransportOptions()

_memories: list[PoolMemory] = []


def make_pool(num_blocks: int = 64, block_bytes: int = 4096, seed: int = 0) -> RegisteredPool:
    memory = PoolMemory(num_blocks * block_bytes)
    memory.buffer[:] = np.random.default_rng(seed).bytes(num_blocks * block_bytes)
    _memories.append(memory)
    return RegisteredPool(memory.buffer, block_bytes, num_blocks, memory_fd=memory.fd)


def idle_cpu_seconds(window_s: float) -> float:
    """Return this process's CPU time in the quietest of several windows: other threads may be ending."""
    used = []
    for _ in range(4):
        before = time.process_time()
        time.sleep(window_s)
        used.append(time.process_time() - before)
    return min(used)


def close_memories() -> None:
    """Close the memory of every pool made so far."""
    while _memories:
        _memories.pop().close()


def block(pool: RegisteredPool, index: int) -> bytes:
    return bytes(pool.buffer[index * pool.block_bytes : (index + 1) * pool.block_bytes])


def is_over(event: object) -> bool:
    return isinstance(event, (Completed, Failed)) or (isinstance(event, Progress) and event.complete)


class End:
    """One end with a pool, and waits for its events. `usual` has options that a test may replace."""

    kind: Any
    usual: ClassVar[dict[str, Any]]

    def __init__(
        self,
        transports: Sequence[str],
        pool: RegisteredPool | None = None,
        wire_options: TransportOptions = PLAIN,
        **options: Any,
    ) -> None:
        self.pool = pool or make_pool()
        self.incarnation = new_incarnation()
        self.wires = open_transports(transports, self.pool, self.incarnation, wire_options)
        self.woken = threading.Event()
        own = {"incarnation": self.incarnation, "transports": self.wires, "on_event": self.woken.set}
        self.end = self.kind(self.pool, **{"key": KEY, **self.usual, **own, **options})

    def wait_for(self, until: Callable[[Any], bool] = is_over, timeout_s: float = WAIT_S) -> list[Any]:
        """Return all events up to and including the batch with the first that `until` accepts."""
        events: list[Any] = []
        deadline = time.monotonic() + timeout_s
        while True:
            events += self.end.poll()
            if any(map(until, events)):
                return events
            assert self.woken.wait(max(0.0, deadline - time.monotonic())), f"only {events}"
            self.woken.clear()

    def wait_lease(self, lease_id: str, timeout_s: float = WAIT_S) -> Any:
        """Return the event that ends a lease."""
        over = lambda event: event.lease_id == lease_id and is_over(event)  # noqa: E731
        return next(filter(over, self.wait_for(over, timeout_s)))

    def close(self) -> None:
        self.end.close()
        for wire in self.wires:
            wire.close()


class ReceiverEnd(End):
    kind = Receiver
    usual: ClassVar = {"worker_id": "decode-0", "host": "127.0.0.1"}

    @property
    def receiver(self) -> Receiver:
        return self.end

    def open(
        self, lease_id: str, blocks: Sequence[int], first_block: int = 0, num_tokens: int | None = None
    ) -> None:
        """Open a lease of blocks of the first block pool."""
        first_token = first_block * self.pool.block_size
        self.receiver.open(
            lease_id, [Extent(0, list(blocks))], first_token=first_token, num_tokens=num_tokens
        )

    @property
    def peer(self) -> PeerAddress:
        return PeerAddress(
            worker_id="decode-0", incarnation=self.incarnation, control="-", offers=self.receiver.offers
        )


class SenderEnd(End):
    kind = Sender
    usual: ClassVar = {"worker_id": "prefill-0"}

    @property
    def sender(self) -> Sender:
        return self.end

    def push(
        self, peer: PeerAddress, lease_id: str, blocks: Sequence[int], first: int = 0, *, final: bool = True
    ) -> None:
        num_tokens = (first + len(blocks)) * self.pool.block_size
        self.sender.push(peer, lease_id, [Extent(0, list(blocks))], first, num_tokens, final=final)


def push_one(sender: SenderEnd, receiver: ReceiverEnd, peer: PeerAddress | None = None) -> Any:
    """Push one block under a lease of its own. Return the sender's last event."""
    receiver.open("lease", [1])
    sender.push(peer or receiver.peer, "lease", [2])
    event = sender.wait_lease("lease")
    if isinstance(event, Completed):
        assert block(receiver.pool, 1) == block(sender.pool, 2)
    receiver.receiver.close_lease("lease")
    return event


def moved(pairs: Pairs, transport: str, counter: str = "kv_transfer_bytes_total") -> float:
    """Return a transport's counter, summed over all peers."""
    states = [state for state in pairs.snapshot({}) if state.transport == transport]
    return sum(state.counters.get(counter, 0.0) for state in states)


def cut(sender: SenderEnd, stream: int = 0) -> None:
    """Break one of the sender's connections, as a failing network does."""
    (link,) = sender.sender._links.values()
    channel = link._streams[stream]._channel
    assert channel is not None
    channel.shutdown()


def wire(transport: str, pool: RegisteredPool) -> Transport:
    return open_transports([transport], pool, "raw-1")[0]


class RawPeer:
    """One end of a data connection that only follows the test's commands."""

    def __init__(self, channel: Channel, wake: Wake) -> None:
        self.channel = channel
        self._wake = wake

    @classmethod
    def connect(
        cls,
        receiver: ReceiverEnd,
        transport: str,
        pool: RegisteredPool,
        incarnation: str = "raw-1",
        checksum: Mode = "off",
    ) -> RawPeer:
        """Authenticate as a sender."""
        raw = cls.connect_only(receiver, transport)
        raw.authenticate(receiver, transport, pool, incarnation, checksum)
        wire(transport, pool).writer(raw.channel, pool, raw.deadline())
        return raw

    def authenticate(
        self,
        receiver: ReceiverEnd,
        transport: str,
        pool: RegisteredPool,
        incarnation: str = "raw-1",
        checksum: Mode = "off",
    ) -> None:
        introduce(
            self.channel,
            Identity(KEY, "raw", incarnation, pool, checksum),
            wire(transport, pool),
            receiver.incarnation,
            self.deadline(),
        )

    @classmethod
    def connect_only(cls, receiver: ReceiverEnd, transport: str) -> RawPeer:
        offer = next(offer for offer in receiver.receiver.offers if offer.transport == transport)
        wake = Wake()
        carrying = wire(transport, receiver.pool)
        channel = carrying.channel(carrying.connect(offer.address), wake, WAIT_S, accepted=False)
        raw = cls(channel, wake)
        channel.finish_connect(raw.deadline())
        return raw

    @staticmethod
    def deadline() -> float:
        return time.monotonic() + WAIT_S

    def send(self, message: Any) -> None:
        self.channel.send(message, self.deadline())

    def send_bytes(self, data: bytes) -> None:
        self.channel.send_all(data, self.deadline())

    def ack(self) -> Ack:
        return self.channel.recv(Ack, self.deadline())

    def is_closed_by_peer(self) -> bool:
        """Return whether the connection ends without another byte for us."""
        self.channel.ready(select.POLLIN, time.monotonic() + WAIT_S)
        try:
            return self.channel.at_end()
        except ConnectionError:
            return True

    def close(self) -> None:
        self.channel.close()
        self._wake.close()


class RawReceiver:
    """A listening receiver that authenticates one sender and then only follows the test's commands."""

    def __init__(self, transport: str, pool: RegisteredPool) -> None:
        self._transport = wire(transport, pool)
        self._pool = pool
        self._listener, self._address = self._transport.listen("127.0.0.1")

    @property
    def peer(self) -> PeerAddress:
        offer = TransferOffer(transport=self._transport.name, host_id=host_id(), address=self._address)
        return PeerAddress(worker_id="raw", incarnation="raw-1", control="-", offers=[offer])

    def accept_unexamined(self) -> RawPeer:
        self._listener.settimeout(WAIT_S)
        accepted, _ = self._listener.accept()
        wake = Wake()
        return RawPeer(self._transport.channel(accepted, wake, WAIT_S, accepted=True), wake)

    def accept(self) -> RawPeer:
        raw = self.accept_unexamined()
        identity = Identity(KEY, "raw", "raw-1", self._pool)
        hello = examine(raw.channel, identity, self._transport, raw.deadline())
        reader = self._transport.reader(raw.channel, self._pool, hello, raw.deadline())
        reader.close()
        return raw

    def piece(self, raw: RawPeer) -> Piece:
        return raw.channel.recv(Piece, raw.deadline())

    def close(self) -> None:
        self._listener.close()
