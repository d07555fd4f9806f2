"""The socket on which a worker receives requests of other workers."""

from __future__ import annotations

import logging

import zmq

from messaging.sockets import bind_router, give_way, start_authenticator
from protocol.codec import encode, peer_request
from protocol.errors import ProtocolError
from protocol.ports import worker_ports
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.parts import WorkerParts

log = logging.getLogger(__name__)


class PeerSocket:
    """Receives requests, each with the identity of its sender. A reply to a peer that is gone is dropped."""

    def __init__(self, parts: WorkerParts) -> None:
        self._counters = parts.counters
        self._authenticator = start_authenticator(parts.context, parts.keys)
        ports = worker_ports(parts.config)
        self.socket, self.endpoint = bind_router(parts.context, parts.keys, parts.host, ports)

    def receive(self) -> list[tuple[bytes, PeerRequest]]:
        """Return all requests that have arrived; never wait."""
        requests: list[tuple[bytes, PeerRequest]] = []
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return requests
            try:
                requests.append((frames[0], peer_request.decode(frames[-1])))
            except ProtocolError as error:
                self._counters.add("dropped_messages_total")
                log.warning("dropped a request of %r: %s", frames[0], error)

    def reply(self, identity: bytes, message: PeerReply) -> None:
        self.socket.send_multipart([identity, encode(message)])
        give_way()

    def close(self) -> None:
        self.socket.close(linger=500)
        self._authenticator.stop()
