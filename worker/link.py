"""A worker's line to the router: requests in, one message of tokens per step out."""

from __future__ import annotations

import logging
import time

import zmq

from messaging.sockets import connect_dealer
from protocol.codec import encode, router_to_worker
from protocol.errors import ProtocolError, TandemError
from protocol.messages import (
    Register,
    Registered,
    RouterToWorker,
    StepOutput,
    TokenOutput,
    WorkerToRouter,
)
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

_REGISTER_RETRY_S = 1.0


class RouterUnreachableError(TandemError):
    """The router did not answer a registration in time."""


class RouterLink:
    """Belongs to the loop's thread. `socket` may be polled from outside; the rest goes through here."""

    def __init__(self, parts: WorkerParts, endpoint: str) -> None:
        self.socket = connect_dealer(parts.context, parts.keys, endpoint, parts.worker_id)
        self._parts = parts
        self._counters = parts.counters

    def register(self, message: Register, timeout_s: float) -> None:
        """Announce the worker until the router confirms this incarnation."""
        deadline = time.monotonic() + timeout_s
        raw = encode(message)
        while time.monotonic() < deadline:
            self.socket.send(raw)
            if self.socket.poll(int(_REGISTER_RETRY_S * 1000)):
                answer = self._receive_one()
                if isinstance(answer, Registered) and answer.incarnation == message.address.incarnation:
                    return
        raise RouterUnreachableError(
            f"the router did not confirm {self._parts.worker_id} within {timeout_s:.0f} s"
        )

    def receive(self) -> list[RouterToWorker]:
        """All messages that have arrived; never waits."""
        messages = []
        while self.socket.poll(0):
            message = self._receive_one()
            if message is not None:
                messages.append(message)
        return messages

    def _receive_one(self) -> RouterToWorker | None:
        """One message that has arrived, unless it cannot be understood."""
        try:
            return router_to_worker.decode(self.socket.recv(zmq.NOBLOCK))
        except ProtocolError as error:
            self._counters.add("dropped_messages_total")
            log.warning("dropped a message of the router: %s", error)
            return None

    def send(self, message: WorkerToRouter) -> None:
        self.socket.send(encode(message))

    def offer(self, raw: bytes) -> None:
        """Send an encoded message, unless the queue is full: it is one that the router can ask for again."""
        try:
            self.socket.send(raw, zmq.NOBLOCK)
        except zmq.Again:
            self._counters.add("dropped_messages_total")

    def send_outputs(self, outputs: list[TokenOutput]) -> None:
        parts = self._parts
        self.send(StepOutput(worker_id=parts.worker_id, incarnation=parts.incarnation, outputs=outputs))

    def close(self) -> None:
        self.socket.close(linger=500)
