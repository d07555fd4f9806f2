"""Control messages between workers by way of a carrier, where workers can't connect to each other.

`MailLinks` and `MailSocket` take the places of the ZeroMQ lines that there are otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from kvtransfer.object_store.carrier import Carrier, Reference
from protocol.codec import MAX_MESSAGE_BYTES, encode, peer_reply, peer_request
from protocol.errors import ProtocolError
from protocol.messages import Id, PeerAddress, PeerReply, PeerRequest
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

KIND = "mail"
MAX_WAITING = 10_000
"""Messages that wait for one peer; more are dropped, as to a peer that is gone."""
FORGET_PEER_S = 60.0

_Letters = Annotated[list[Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES)]], Meta(max_length=MAX_WAITING)]


class Bag(msgspec.Struct, array_like=True):
    """Messages of one worker to another, each kind in order."""

    origin: Id
    requests: _Letters = []
    replies: _Letters = []

    def __len__(self) -> int:
        return len(self.requests) + len(self.replies)


class Mail:
    """Sends without waiting, one bag at a time to each peer.

    `on_arrival` is called from a thread of the carrier's.
    """

    def __init__(self, carrier: Carrier, on_arrival: Callable[[], None]) -> None:
        self.address = carrier.address
        self._carrier = carrier
        self._on_arrival = on_arrival
        self._lock = threading.Lock()
        self._waiting: dict[str, Bag] = {}
        """What to send next to each peer that a bag is on its way to."""
        self._requests: deque[tuple[str, bytes]] = deque()
        self._replies: deque[tuple[str, bytes]] = deque()
        carrier.handle(KIND, self._take)

    def send_request(self, address: str, raw: bytes) -> bool:
        """Whether the message is on its way, or waits for it."""
        return self._send(address, Bag(self.address, requests=[raw]))

    def send_reply(self, address: str, raw: bytes) -> bool:
        return self._send(address, Bag(self.address, replies=[raw]))

    def requests(self) -> list[tuple[str, bytes]]:
        """The requests that have come since the last call, with their senders' addresses."""
        return _take_all(self._requests)

    def replies(self) -> list[tuple[str, bytes]]:
        return _take_all(self._replies)

    def _send(self, address: str, bag: Bag) -> bool:
        with self._lock:
            waiting = self._waiting.get(address)
            if waiting is not None:
                if len(waiting) >= MAX_WAITING:
                    return False
                waiting.requests += bag.requests
                waiting.replies += bag.replies
                return True
            self._waiting[address] = Bag(self.address, [], [])
        self._post(address, bag)
        return True

    def _post(self, address: str, bag: Bag) -> None:
        self._carrier.deliver(address, KIND, encode(bag), [], partial(self._posted, address))

    def _posted(self, address: str, error: str) -> None:
        if error:
            log.warning("messages to %s are lost: %s", address, error)
        with self._lock:
            bag = self._waiting.pop(address)
            if error or not len(bag):
                return
            self._waiting[address] = Bag(self.address, [], [])
        self._post(address, bag)

    def _take(self, parcel: bytes, objects: list[Reference]) -> bool:
        try:
            bag = msgspec.msgpack.decode(parcel, type=Bag)
        except msgspec.DecodeError as error:
            log.warning("dropped a bag of messages: %s", error)
            return False
        self._requests += [(bag.origin, raw) for raw in bag.requests]
        self._replies += [(bag.origin, raw) for raw in bag.replies]
        self._on_arrival()
        return True


def _take_all(queue: deque[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [queue.popleft() for _ in range(len(queue))]


class MailLinks:
    """The asking side: requests to peers, and their replies."""

    def __init__(self, parts: WorkerParts, mail: Mail) -> None:
        self._counters = parts.counters
        self._mail = mail
        self._peers: dict[str, tuple[PeerAddress, float]] = {}

    def send(self, peer: PeerAddress, message: PeerRequest) -> None:
        self._peers[peer.control] = peer, time.monotonic()
        if not self._mail.send_request(peer.control, encode(message)):
            self._counters.add("dropped_messages_total")

    def receive(self, events: dict[object, int]) -> list[tuple[PeerAddress, PeerReply]]:
        """All replies that have arrived, each with the worker that it came from."""
        replies: list[tuple[PeerAddress, PeerReply]] = []
        for origin, raw in self._mail.replies():
            try:
                replies.append((self._peers[origin][0], peer_reply.decode(raw)))
            except (KeyError, ProtocolError) as error:
                self._counters.add("dropped_messages_total")
                log.warning("dropped a reply of %s: %r", origin, error)
        return replies

    def close_idle(self, now: float, in_use: set[str]) -> None:
        """Forget peers whose incarnation is not `in_use` and has not been for a while."""
        for address, (peer, last_used) in list(self._peers.items()):
            if peer.incarnation not in in_use and now - last_used > FORGET_PEER_S:
                del self._peers[address]

    def close(self) -> None:
        self._peers.clear()


class MailSocket:
    """The answering side. `socket` is readable when requests may have come."""

    def __init__(self, parts: WorkerParts, mail: Mail) -> None:
        self._counters = parts.counters
        self._mail = mail
        self.socket = parts.wake.fileno()
        self.endpoint = mail.address

    def receive(self) -> list[tuple[bytes, PeerRequest]]:
        """All requests that have arrived, each with the identity of whom to answer."""
        requests: list[tuple[bytes, PeerRequest]] = []
        for origin, raw in self._mail.requests():
            try:
                requests.append((origin.encode(), peer_request.decode(raw)))
            except ProtocolError as error:
                self._counters.add("dropped_messages_total")
                log.warning("dropped a request of %s: %s", origin, error)
        return requests

    def reply(self, identity: bytes, message: PeerReply) -> None:
        if not self._mail.send_reply(identity.decode(), encode(message)):
            self._counters.add("dropped_messages_total")

    def close(self) -> None:
        return
