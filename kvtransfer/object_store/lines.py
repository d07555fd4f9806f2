"""Connections whose bytes travel as parcels: pairs of local sockets, and a thread that carries between them.

Each end of a line is a socket pair. The outer socket is what the rest of kvtransfer takes for a connection;
what is written to it is read from the inner one and handed to the peer's worker, which writes it to the inner
socket of its own pair. At most one parcel of a line is on its way in each direction: that keeps the order,
and lets a peer that reads nothing fill no more than socket buffers.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
from collections import deque
from functools import partial
from typing import Annotated
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Meta

from kvtransfer.channel import StoppedError, Wake, decode, encode
from kvtransfer.object_store.carrier import Carrier, Reference
from kvtransfer.stream import MAX_IN_FLIGHT
from protocol.errors import ProtocolError
from protocol.messages import Id

logger = logging.getLogger("tandem.kvtransfer")

KIND = "line"
PARCEL_BYTES = 64 * 1024
_SOCKET_BYTES = 512 * 1024
"""More than the messages of all pieces in flight, so that taking a parcel never blocks."""
_BACKLOG = 128
_JOIN_S = 10.0


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a line. The first parcel `begins` it, the last one `ends` it."""

    line_id: Id
    origin: Id
    data: Annotated[bytes, Meta(max_length=PARCEL_BYTES)]
    begins: bool = False
    ends: bool = False


class Line:
    """This worker's end of a line to `address`. The fields are guarded by the lock of `Lines`."""

    def __init__(self, line_id: str, address: str, *, begun: bool) -> None:
        self.line_id = line_id
        self.address = address
        self.begun = begun
        self.outer, self.inner = socket.socketpair()
        self.inner.setblocking(False)
        self.inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self.sent: deque[Reference] = deque()
        """Objects that go with the next parcel."""
        self.arrived: deque[Reference] = deque()
        self.is_busy = False
        """A parcel is on its way."""
        self.peer_ended = False
        self.outer_ended = False

    def read(self) -> bytes:
        """Some of what was written to the outer socket; notes its end."""
        try:
            data = self.inner.recv(PARCEL_BYTES)
        except BlockingIOError:
            return b""
        except OSError:  # closed with bytes unread
            data = b""
        self.outer_ended = not data
        return data

    def write(self, data: bytes, objects: list[Reference]) -> bool:
        """Pass on what the peer sent; whether it kept to what may be in flight."""
        self.arrived += objects
        try:
            fits = self.inner.send(data) == len(data) if data else True
        except OSError:
            fits = False
        return fits and len(self.arrived) <= MAX_IN_FLIGHT

    def end(self) -> None:
        """The peer says no more: who reads the outer socket finds what has come, then its end."""
        self.peer_ended = True
        try:
            self.inner.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the outer socket is closed

    def close(self) -> None:
        self.inner.close()
        self.outer.close()


class LineListener:
    """Lines that peers begin, as a listening socket gives them."""

    def __init__(self) -> None:
        self._wake = Wake()
        self._lock = threading.Lock()
        self._waiting: deque[socket.socket] = deque()
        self._closed = False

    def add(self, outer: socket.socket) -> bool:
        """Whether there is room for one more."""
        with self._lock:
            if self._closed or len(self._waiting) >= _BACKLOG:
                return False
            self._waiting.append(outer)
            self._wake.set()
            return True

    def fileno(self) -> int:
        return self._wake.fileno()

    def setblocking(self, flag: bool, /) -> None:
        return  # it never blocks

    def accept(self) -> tuple[socket.socket, str]:
        with self._lock:
            self._wake.clear()
            if not self._waiting:
                raise BlockingIOError
            outer = self._waiting.popleft()
            if self._waiting:
                self._wake.set()
            return outer, ""

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popleft().close()
            self._wake.close()


class Lines(threading.Thread):
    """All lines of one worker, and the thread that sends their parcels. `close` ends it."""

    def __init__(self, carrier: Carrier) -> None:
        super().__init__(name="kv-lines", daemon=True)
        self._carrier = carrier
        self._wake = Wake()
        self._lock = threading.Lock()
        self._lines: dict[str, Line] = {}
        self._by_outer: WeakKeyDictionary[socket.socket, Line] = WeakKeyDictionary()
        self._watched: set[str] = set()
        self._listener: LineListener | None = None
        self._closed = False
        carrier.handle(KIND, self._take)
        self.start()

    # --- for any thread ---------------------------------------------------------------------------

    def listen(self) -> LineListener:
        with self._lock:
            self._listener = LineListener()
            return self._listener

    def open(self, address: str) -> socket.socket:
        """Begin a line; returns its outer socket. Raises OSError where there is nobody."""
        self._watch(address)
        with self._lock:
            if self._closed:
                raise ConnectionError("the transport is closed")
            line = self._add(Line(secrets.token_hex(16), address, begun=False))
            self._wake.set()
        return line.outer

    def line_of(self, outer: socket.socket) -> Line:
        return self._by_outer[outer]

    def send_object(self, line: Line, reference: Reference) -> None:
        """Let an object travel with the next bytes that are written to the line."""
        with self._lock:
            line.sent.append(reference)

    def take_object(self, line: Line) -> Reference:
        """The next object that came with the line's bytes. Raises ProtocolError if there is none."""
        with self._lock:
            if not line.arrived:
                raise ProtocolError("a piece came without its object")
            return line.arrived.popleft()

    def forget_objects(self, line: Line) -> None:
        with self._lock:
            line.sent.clear()
            line.arrived.clear()

    def close(self) -> None:
        """End every line. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._wake.stop()
        self.join(_JOIN_S)

    # --- for the carrier's threads ----------------------------------------------------------------

    def _take(self, raw: bytes, objects: list[Reference]) -> bool:
        try:
            parcel = decode(raw, Parcel)
            if parcel.begins:
                self._watch(parcel.origin)
        except (ProtocolError, OSError) as error:
            logger.warning("dropped a parcel: %s", str(error))
            return False
        with self._lock:
            if self._closed:
                return False
            line = self._accept(parcel) if parcel.begins else self._lines.get(parcel.line_id)
            if line is None or line.address != parcel.origin or line.peer_ended:
                return False
            fits = line.write(parcel.data, objects)
            if parcel.ends or not fits:
                line.end()
            return fits

    def _accept(self, parcel: Parcel) -> Line | None:
        if self._listener is None or parcel.line_id in self._lines:
            return None
        line = Line(parcel.line_id, parcel.origin, begun=True)
        if not self._listener.add(line.outer):
            line.close()
            return None
        self._wake.set()
        return self._add(line)

    def _add(self, line: Line) -> Line:
        self._lines[line.line_id] = self._by_outer[line.outer] = line
        return line

    def _watch(self, address: str) -> None:
        with self._lock:
            if address in self._watched:
                return
            self._watched.add(address)
        try:
            self._carrier.watch(address, self._lost)
        except OSError:
            self._lost(address)
            raise

    def _lost(self, address: str) -> None:
        """The worker at the address has ended."""
        with self._lock:
            self._watched.discard(address)
            for line in self._lines.values():
                if line.address == address:
                    line.end()

    def _delivered(self, line: Line, error: str) -> None:
        with self._lock:
            line.is_busy = False
            if error:
                logger.info("a line to %s ends: %s", line.address, error)
                line.end()
            if not self._closed:
                self._wake.set()

    # --- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while True:
                self._turn()
        except StoppedError:
            logger.debug("the lines are closing")
        except Exception:
            logger.exception("the lines ended by a defect")
        finally:
            self._end_all()

    def _turn(self) -> None:
        """Wait until some line has bytes or an end to send, and send them."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        with self._lock:
            idle = {line.inner.fileno(): line for line in self._lines.values() if not line.is_busy}
        for descriptor in idle:
            poll.register(descriptor, select.POLLIN)
        ready = dict(poll.poll())
        self._wake.clear()
        for descriptor in ready.keys() & idle.keys():
            self._serve(idle[descriptor])

    def _serve(self, line: Line) -> None:
        with self._lock:
            begins, data, objects = not line.begun, line.read(), list(line.sent)
            line.sent.clear()
            if line.outer_ended or line.peer_ended:
                self._drop(line)
            if line.peer_ended or not (data or (line.outer_ended and line.begun)):
                return
            line.begun = line.is_busy = True
        self._send(line, Parcel(line.line_id, self._carrier.address, data, begins, line.outer_ended), objects)

    def _send(self, line: Line, parcel: Parcel, objects: list[Reference]) -> None:
        on_done = partial(self._delivered, line)
        self._carrier.deliver(line.address, KIND, encode(parcel), objects, on_done)

    def _drop(self, line: Line) -> None:
        del self._lines[line.line_id]
        line.inner.close()

    def _end_all(self) -> None:
        with self._lock:
            self._closed = True
            lines = list(self._lines.values())
            for line in lines:
                line.end()
                self._drop(line)
            self._wake.close()
        for line in lines:
            if line.begun:
                self._send(line, Parcel(line.line_id, self._carrier.address, b"", ends=True), [])
