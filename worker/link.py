"""A worker's sockets to its routers, which send requests and get one message of tokens per step, and to other
workers: a DEALER to each for its own requests, a ROUTER for other workers'.

A request belongs to the router whose incarnation is the start of the request's id.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq

from messaging.sockets import bind_router, connect_dealer, give_way, start_authenticator
from protocol.codec import BoundedDecoder, encode, peer_reply, peer_request, router_to_worker
from protocol.errors import ProtocolError, TandemError
from protocol.ids import PeerAddress, peer_identity, router_of
from protocol.outputs import TokenOutput
from protocol.ports import worker_ports
from protocol.router_to_worker import Refused, Registered, RouterToWorker
from protocol.version import protocol_problem
from protocol.worker_to_router import Register, StepOutput, WorkerToRouter
from protocol.worker_to_worker import PeerReply, PeerRequest
from worker.parts import Counters, WorkerParts

log = logging.getLogger(__name__)

_REGISTER_RETRY_S = 1.0

T = TypeVar("T")


class RouterUnreachableError(TandemError):
    """No router answered a registration in time."""


class RegistrationRefusedError(TandemError):
    """The router does not accept this worker."""


class RouterLink:
    """The connection to one router, whose process may be replaced by another one.

    Belongs to the loop's thread, except `is_connected`: the heartbeat's thread sets whether it is connected.
    """

    def __init__(self, parts: WorkerParts, endpoint: str) -> None:
        self.endpoint = endpoint
        self.socket = connect_dealer(parts.context, parts.keys, endpoint, parts.worker_id)
        self.is_connected = True
        self.router: str | None = None
        """The incarnation of the router that has confirmed this worker's incarnation, or None."""
        self.told_leaving = False
        self.has_let_go = False
        """Whether the router has no more requests on this worker, which is leaving."""
        self._counters = parts.counters

    def receive(self) -> Iterator[RouterToWorker]:
        """Yield the messages that have arrived, without waiting."""
        for _, message in arrived(self.socket, router_to_worker, self._counters, "the router"):
            yield message

    def confirmed(self, router: str | None) -> None:
        """Note the incarnation of the router that knows the worker's current incarnation, or None."""
        self.router, self.told_leaving, self.has_let_go = router, False, False

    def send(self, message: WorkerToRouter) -> None:
        self.socket.send(encode(message))

    def offer(self, raw: bytes) -> None:
        """Send an encoded message, or drop it if the queue is full. The router can ask for it again."""
        try:
            self.socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            self._counters.add("dropped_messages_total")


class RouterLinks:
    """The connections to all routers. Belongs to the loop's thread; other threads may poll `sockets`."""

    def __init__(self, parts: WorkerParts, endpoints: Sequence[str]) -> None:
        self._parts = parts
        self._links = [RouterLink(parts, endpoint) for endpoint in endpoints]
        self.sockets = [link.socket for link in self._links]
        self._registration = b""

    def __iter__(self) -> Iterator[RouterLink]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def register(self, message: Register, timeout_s: float) -> None:
        """Announce the worker until a router confirms this incarnation. Raises `RegistrationRefusedError`.

        The loop receives other routers' answers. A router that is still starting will ask for the
        registration.
        """
        self._registration = encode(message)
        poller = zmq.Poller()
        for link in self._links:
            link.confirmed(None)
            poller.register(link.socket, zmq.POLLIN)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for link in self._links:
                link.socket.send(self._registration)
            if self._is_confirmed(poller, message.address.incarnation):
                return
        worker_id = self._parts.worker_id
        raise RouterUnreachableError(f"the router did not confirm {worker_id} within {timeout_s:.0f} s")

    def register_again(self, link: RouterLink) -> None:
        """Send the registration again to a router that does not know the worker."""
        link.socket.send(self._registration)

    def send(self, request_id: str, message: WorkerToRouter) -> None:
        """Send a message to the request's own router, if it is connected."""
        link = self._owner(request_id)
        if link is not None:
            link.send(message)

    def offer(self, raw: bytes) -> None:
        """Call `RouterLink.offer` for all routers."""
        for link in self._links:
            link.offer(raw)

    def send_outputs(self, outputs: list[TokenOutput]) -> None:
        """Send each router the outputs of its own requests."""
        if len(self._links) == 1:
            self._send_step(self._links[0], outputs)
            return
        by_link: dict[RouterLink, list[TokenOutput]] = defaultdict(list)
        for output in outputs:
            if (link := self._owner(output.request_id)) is not None:
                by_link[link].append(output)
        for link, group in by_link.items():
            self._send_step(link, group)

    def close(self) -> None:
        for link in self._links:
            link.socket.close(linger=500)

    def _is_confirmed(self, poller: zmq.Poller, incarnation: str) -> bool:
        retry_at = time.monotonic() + _REGISTER_RETRY_S
        while (left := retry_at - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            for link in self._links:
                answer = next(link.receive(), None) if link.socket in ready else None
                if isinstance(answer, Refused) and answer.incarnation == incarnation:
                    raise RegistrationRefusedError(f"the router refuses this worker: {answer.reason}")
                if isinstance(answer, Registered) and answer.incarnation == incarnation:
                    problem = protocol_problem(answer.protocol, answer.release, "the worker", "the router")
                    if problem:
                        raise RegistrationRefusedError(problem)
                    link.confirmed(answer.router)
                    return True
        return False

    def _owner(self, request_id: str) -> RouterLink | None:
        if len(self._links) == 1:
            return self._links[0]
        router = router_of(request_id)
        for link in self._links:
            if link.router == router:
                return link
        self._parts.counters.add("dropped_messages_total")
        log.debug("nothing is said of %s: its router is gone", request_id)
        return None

    def _send_step(self, link: RouterLink, outputs: list[TokenOutput]) -> None:
        """Send a step's outputs. An output with prompt log-probabilities, which are long, is sent alone."""
        parts = self._parts
        long = [[output] for output in outputs if output.prompt_logprobs]
        others = [output for output in outputs if not output.prompt_logprobs] if long else outputs
        for group in (others, *long):
            if group:
                link.send(StepOutput(**parts.ids, outputs=group))


class RouterLeases:
    """The time when each router, which may be away for `ttl_s`, was last connected. For the loop's thread."""

    def __init__(self, links: RouterLinks, ttl_s: float) -> None:
        self._links = links
        self._ttl_s = ttl_s
        self._last_seen: dict[str, float] = {}

    def expired(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Return the requests of lost routers, if another router is connected and can use their resources.

        Without a connected router the result is empty; if that lasts, the worker ends itself.
        """
        present = {link.router for link in self._links if link.is_connected and link.router is not None}
        if not present:
            return []
        owners = {request_id: router_of(request_id) for request_id in request_ids}
        seen = {router: self._last_seen.get(router, now) for router in owners.values()}
        self._last_seen = seen | dict.fromkeys(present, now)
        return [id for id, router in owners.items() if now - self._last_seen[router] > self._ttl_s]


def arrived(
    socket: zmq.Socket[bytes], decoder: BoundedDecoder[T], counters: Counters, sender: str = ""
) -> Iterator[tuple[bytes, T]]:
    """Yield the messages that have arrived, each with its first frame: its sender's identity at a ROUTER."""
    while True:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        try:
            yield frames[0], decoder.decode(frames[-1])
        except ProtocolError as error:
            counters.add("dropped_messages_total")
            log.warning("dropped a message of %r: %s", sender or frames[0], error)


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
