"""A worker's sockets to other workers: a DEALER to each for its own requests, a ROUTER for other workers'."""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from messaging.sockets import bind_router, connect_dealer, give_way, start_authenticator
from protocol.codec import encode, peer_reply, peer_request
from protocol.ids import PeerAddress, peer_identity
from protocol.ports import worker_ports
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.link import arrived
from worker.parts import WorkerParts

IDLE_LINK_S = 60.0


@dataclass(eq=False)
class _Link:
    address: PeerAddress
    socket: zmq.Socket[bytes]
    last_used: float


class PeerLinks:
    """The DEALER sockets: opened at first use, closed after long disuse, also those to dead incarnations."""

    def __init__(self, parts: WorkerParts, poller: zmq.Poller) -> None:
        self._parts = parts
        self._poller = poller
        self._links: dict[str, _Link] = {}

    def send(self, peer: PeerAddress, message: PeerRequest, flags: int = 0) -> None:
        link = self._links.get(peer.incarnation) or self._open(peer)
        link.last_used = time.monotonic()
        link.socket.send(encode(message), flags)
        give_way()

    def offer(self, peer: PeerAddress, message: PeerRequest) -> bool:
        """Send a message that may be lost; return False if the queue to the peer is full."""
        try:
            self.send(peer, message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, events: dict[object, int]) -> list[tuple[PeerAddress, PeerReply]]:
        """Return all replies that have arrived, each with the worker that sent it."""
        return [
            (link.address, reply)
            for link in self._links.values()
            if link.socket in events
            for _, reply in arrived(link.socket, peer_reply, self._parts.counters, link.address.worker_id)
        ]

    def close_idle(self, now: float, in_use: set[str]) -> None:
        """Close connections to incarnations that are not `in_use` and have not been for a while."""
        for incarnation, link in list(self._links.items()):
            if incarnation not in in_use and now - link.last_used > IDLE_LINK_S:
                self._close(incarnation)

    def close(self) -> None:
        for incarnation in list(self._links):
            self._close(incarnation)

    def _open(self, peer: PeerAddress) -> _Link:
        identity = peer_identity(self._parts.worker_id, self._parts.incarnation)
        socket = connect_dealer(self._parts.context, self._parts.keys, peer.control, identity)
        self._poller.register(socket, zmq.POLLIN)
        link = _Link(peer, socket, time.monotonic())
        self._links[peer.incarnation] = link
        return link

    def _close(self, incarnation: str) -> None:
        link = self._links.pop(incarnation)
        self._poller.unregister(link.socket)
        link.socket.close(linger=500)


class PeerSocket:
    """The ROUTER socket: requests come with their sender's identity. Replies to lost peers are dropped."""

    def __init__(self, parts: WorkerParts) -> None:
        self._counters = parts.counters
        self._authenticator = start_authenticator(parts.context, parts.keys)
        ports = worker_ports(parts.config)
        self.socket, self.endpoint = bind_router(parts.context, parts.keys, parts.host, ports)

    def receive(self) -> list[tuple[bytes, PeerRequest]]:
        """Return all requests that have arrived, without waiting."""
        return list(arrived(self.socket, peer_request, self._counters))

    def reply(self, identity: bytes, message: PeerReply) -> None:
        self.socket.send_multipart([identity, encode(message)])
        give_way()

    def close(self) -> None:
        self.socket.close(linger=500)
        self._authenticator.stop()
