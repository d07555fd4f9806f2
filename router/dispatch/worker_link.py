"""The router's socket to the workers, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from messaging.sockets import ClusterKeys, bind_router, start_authenticator
from protocol.codec import encode, introduction, worker_to_router
from protocol.errors import ProtocolError
from protocol.version import PROTOCOL
from protocol.worker_to_router import Register, RegisterHeader, WorkerToRouter
from router.observe.metrics import Metrics
from router.requests.slices import SLICE_S
from router.workers.registry import Worker

logger = logging.getLogger(__name__)

HEARTBEAT_SUFFIX = "/hb"


class WorkerLink:
    """A ROUTER socket that is bound at once; the event loop reads it after `attach()`."""

    def __init__(self, keys: ClusterKeys, host: str, metrics: Metrics, ports: Sequence[int]) -> None:
        self._metrics = metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = start_authenticator(self._context, keys)
        self._socket, self.endpoint = bind_router(self._context, keys, host, ports)
        self._socket.router_mandatory = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[WorkerToRouter | RegisterHeader], None] | None = None

    def attach(
        self, loop: asyncio.AbstractEventLoop, on_message: Callable[[WorkerToRouter | RegisterHeader], None]
    ) -> None:
        self._loop, self._on_message = loop, on_message
        loop.add_reader(self._socket.fileno(), self._read)
        loop.call_soon(self._read)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._authenticator.stop()
            self._context.term()

    def send(self, worker: Worker, message: msgspec.Struct) -> bool:
        """Queue a message. Return False if the worker has no connection or its queue is full."""
        return self.send_to(worker.key.worker_id, message)

    def send_to(self, worker_id: str, message: msgspec.Struct) -> bool:
        """Queue a message like `send`, also for a worker that has not registered."""
        try:
            self._socket.send_multipart((worker_id.encode(), encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("cannot send to worker %s: %s", worker_id, error)
            return False
        finally:
            # the descriptor signals only changes, and sending may have consumed one
            if self._loop is not None and self._readable():
                self._loop.call_soon(self._read)
        return True

    def _readable(self) -> bool:
        events = self._socket.getsockopt(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def _read(self) -> None:
        if self._loop is None:
            return
        turn_ends = time.perf_counter() + SLICE_S
        while self._readable():
            self._handle(self._socket.recv_multipart(zmq.NOBLOCK))
            if time.perf_counter() >= turn_ends:
                self._loop.call_soon(self._read)
                return

    def _handle(self, frames: list[bytes]) -> None:
        message = self._decode(frames)
        if message is None or self._on_message is None:
            return
        try:
            self._on_message(message)
        except Exception:  # an error in one worker's message must not stop the router
            logger.exception("a message from worker %r failed", frames[0])
            self._metrics.count("messages_dropped_total", "failed")

    def _decode(self, frames: list[bytes]) -> WorkerToRouter | RegisterHeader | None:
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames)} frames instead of 2")
            message = _understood(frames[1])
            sender = frames[0].decode(errors="replace").removesuffix(HEARTBEAT_SUFFIX)
            if sender != _worker_id(message):
                raise ProtocolError(f"it speaks for worker {_worker_id(message)}")
        except ProtocolError as error:
            logger.warning("dropped a message from %r: %s", frames[0][:64], error)
            self._metrics.count("messages_dropped_total", "malformed")
            return None
        return message


def _understood(raw: bytes) -> WorkerToRouter | RegisterHeader:
    """Decode a message; only its introduction if it has another protocol version."""
    try:
        return worker_to_router.decode(raw)
    except ProtocolError:
        with contextlib.suppress(ProtocolError):
            other = introduction.decode(raw)
            if other.protocol != PROTOCOL:
                return other
        raise


def _worker_id(message: WorkerToRouter | RegisterHeader) -> str:
    match message:
        case Register() | RegisterHeader():
            return message.address.worker_id
        case _:
            return message.worker_id
