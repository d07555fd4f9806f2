"""Messages of a data connection, and the channel that carries them. Every field is bounded by its type."""

from __future__ import annotations

import contextlib
import enum
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from kvtransfer.blocks.extents import MAX_PIECE_BLOCKS, PARTS_AT_ONCE, RUN_BYTES
from messaging.wake import Wake
from protocol.errors import ProtocolError
from protocol.handoff import MAX_SEGMENTS, BlockPoolIndex, SegmentInfo
from protocol.ids import Id

WIRE_VERSION = 6
NONCE_BYTES = 32

GOOD, SPOILED = b"good", b"void"
"""The trailer after a piece's blocks. `SPOILED`: the sender aborted midway and padded the rest.

Any other trailer means that bytes were lost or duplicated: the rest of the stream is unreadable.
"""
SIZE_BYTES = 4
"""Bytes of the size before each slice of a coded piece. `SPOILED` instead of a size ends the piece."""


class PieceRefusal(enum.StrEnum):
    """The reasons to refuse a piece. A reason's counter is its name in lower case."""

    UNKNOWN_LEASE = "unknown lease"
    OTHER_SENDER = "the lease belongs to another sender"
    OUTSIDE_OF_LEASE = "blocks outside of the lease"
    UNKNOWN_BLOCK_POOL = "a block pool that the lease does not have"
    GIVEN_UP = "given up by the sender"
    STILL_WRITTEN = "an earlier attempt at the piece is still writing"
    OVERTAKEN = "a later attempt at the piece has begun"
    CHECKSUM_MISMATCH = "checksum mismatch"
    OUT_OF_RANGE = "a value beyond the range of the pool's dtype"
    NOT_QUANTIZABLE = "a value that can't be quantized"


TRANSIENT = {PieceRefusal.STILL_WRITTEN, PieceRefusal.CHECKSUM_MISMATCH}
"""Refusals after which the piece may be sent once more."""


def failure_kind(refusal: str) -> str:
    """Return the counter for a refusal. The set of counters is bounded, whatever a peer answers."""
    return next((known.name.lower() for known in PieceRefusal if known == refusal), "refused")


def error_kind(error: Exception) -> str:
    """Return the counter for a connection that ended by this error. `internal` means a bug of ours."""
    if isinstance(error, ProtocolError):
        return "malformed"
    if isinstance(error, TimeoutError):
        return "timeout"
    return "lost" if isinstance(error, OSError) else "internal"


Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Reason = Annotated[str, Meta(max_length=512)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
Segments = Annotated[list[SegmentInfo], Meta(max_length=MAX_SEGMENTS)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Sender to receiver: both ids, the segments of the sender's pool, and its layout on the wire."""

    version: Number
    nonce: Nonce
    transport: Id
    worker_id: Id
    incarnation: Id
    receiver_incarnation: Id
    block_bytes: Number
    num_blocks: Number
    segments: Segments
    wire: Segments
    checksum: Literal["off", "sampled", "full"] = "off"


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The sender's proof that it holds the key."""

    mac: Digest


class HelloAnswer(msgspec.Struct, frozen=True, tag="verdict"):
    """The receiver's answer: the Hello's `refused_field` with the reason, or an empty field for yes.

    `codec` names the code that pieces may use; empty for none.
    """

    worker_id: Id
    incarnation: Id
    refused_field: Annotated[str, Meta(max_length=64)] = ""
    reason: Reason = ""
    codec: Annotated[str, Meta(max_length=64)] = ""


class SealedAnswer(msgspec.Struct, frozen=True, tag="sealed"):
    """An encoded HelloAnswer with the receiver's proof that it holds the key."""

    body: Annotated[bytes, Meta(max_length=4096)]
    mac: Digest


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The announcement of blocks of one lease and block pool, which follow it.

    `runs` are encoded as in `extents`. The blocks are `num_parts` parts of a prompt, from part `index` on; a
    part keeps its index when it is sent again, possibly in another piece. `final` marks the piece with the
    last part. `checksum` covers the blocks' bytes before they are coded, in the mode that the Hello names.
    The piece was pushed `pushed_s` after the lease's first one, and waited `waited_s` before it was sent. It
    was sent `attempt` times before. A `coded` piece's blocks come in slices (`blocks.codec`).
    """

    sequence: Number
    lease_id: Id
    index: Number
    num_parts: Annotated[int, Meta(ge=1, le=PARTS_AT_ONCE)]
    runs: Annotated[bytes, Meta(max_length=MAX_PIECE_BLOCKS * RUN_BYTES)]
    final: bool
    checksum: Annotated[bytes, Meta(min_length=8, max_length=8)] | None = None
    pushed_s: Duration = 0.0
    waited_s: Duration = 0.0
    attempt: Number = 0
    block_pool: BlockPoolIndex = 0
    coded: bool = False

    @property
    def part_indices(self) -> range:
        return range(self.index, self.index + self.num_parts)


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's answer: the piece is in place, or `error` says why not. With `again`, resend it."""

    sequence: Number
    error: Reason = ""
    again: bool = False


MAX_MESSAGE_BYTES = 64 * 1024
LENGTH_BYTES = 4
CHECK_BYTES = 4
PREFIX_BYTES = LENGTH_BYTES + CHECK_BYTES
"""Bytes before a message's payload."""
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""The first bytes of a TLS alert and a TLS handshake. With the next two they exceed our lengths."""

T = TypeVar("T")
Buffer: TypeAlias = memoryview | bytearray
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def frame(payload: bytes) -> bytes:
    """Return a message as sent: its length, a checksum of length and payload, the payload.

    A damaged piece message could make the receiver write blocks to wrong places.
    """
    length = len(payload).to_bytes(LENGTH_BYTES, "little")
    return length + xxhash.xxh32_digest(length + payload) + payload


def unframe(framed: bytearray) -> bytearray:
    """Return the payload of a whole frame. Raises ProtocolError for a frame damaged in transit."""
    payload = framed[PREFIX_BYTES:]
    if xxhash.xxh32_digest(framed[:LENGTH_BYTES] + payload) != framed[LENGTH_BYTES:PREFIX_BYTES]:
        raise ProtocolError("a message was damaged on the way")
    return payload


def decode(payload: bytes | bytearray, message_type: type[T]) -> T:
    """Decode a message. Raises ProtocolError if it is not of this type."""
    try:
        return msgspec.msgpack.decode(payload, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a {message_type.__name__} message: {error}") from error


def frame_length(header: bytes | bytearray) -> int:
    length = int.from_bytes(header[:LENGTH_BYTES], "little")
    if length > MAX_MESSAGE_BYTES:
        if bytes(header[:2]) in _TLS_RECORDS:
            raise ProtocolError("the peer speaks TLS, and this side does not")
        raise ProtocolError(f"a message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    return length


class Channel:
    """Frames and bytes over a non-blocking `socket`. Deadlines are values of `time.monotonic()`.

    A connection counts as broken if an operation makes no progress for `progress_timeout_s` seconds.
    """

    def __init__(self, sock: socket.socket, wake: Wake, progress_timeout_s: float) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.progress_timeout_s = progress_timeout_s
        self._wake = wake
        self._ending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, 0)
        self._poll.register(wake, select.POLLIN)
        self._events = 0

    def progress_deadline(self) -> float:
        """Return the deadline for the peer's next progress, counted from now."""
        return time.monotonic() + self.progress_timeout_s

    def wait(self, events: int, deadline: float | None) -> int:
        """Wait for poll events of the socket. Return 0 when woken. Raises TimeoutError, StoppedError."""
        if events != self._events:
            self._poll.modify(self.socket, events)
            self._events = events
        timeout_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = dict(self._poll.poll(timeout_ms))
        if not ready:
            raise TimeoutError("the peer made no progress in time")
        if ready.pop(self._wake.fileno(), 0):
            self._wake.clear()
        return next(iter(ready.values()), 0)

    def ready(self, events: int, deadline: float) -> None:
        """Wait for events, and ignore wake-ups."""
        while not self.wait(events, deadline):
            pass

    def finish_connect(self, deadline: float) -> None:
        """Wait until `connect` is done; raise its error, if any."""
        self.ready(select.POLLOUT, deadline)
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    def hung_up(self) -> bool:
        """Return whether the peer has closed its side, even if data is left to read. Raises StoppedError."""
        try:
            return bool(self.wait(select.POLLRDHUP, time.monotonic()))
        except TimeoutError:
            return False

    def at_end(self) -> bool:
        """Return whether the peer has closed its side and no data is left to read."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def shutdown(self) -> None:
        """End the connection from another thread; the owner of the channel sees it as lost.

        Once this returns the peer can send nothing more, even if the owner closes the channel meanwhile.
        """
        with self._ending, contextlib.suppress(OSError):  # the connection has ended already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._ending:
            self.socket.close()

    # --- bytes ------------------------------------------------------------------------------------

    def write(self, buffers: Sequence[Buffer]) -> int:
        """Return how many bytes of the buffers the connection took at once, possibly 0."""
        try:
            return self.socket.sendmsg(buffers)
        except BlockingIOError:
            return 0

    def receive(self, buffers: Sequence[Buffer]) -> int:
        """Fill the buffers as far as possible; return the bytes. Raises ConnectionResetError at the end."""
        try:
            received = self.socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        return received

    def send_all(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            sent = self.write([view])
            view = view[sent:]
            if not sent:
                self.wait(select.POLLOUT, deadline)

    def recv_exact(self, nbytes: int, deadline: float) -> bytearray:
        """Receive exactly `nbytes` bytes. Raises ConnectionResetError if the peer closes first."""
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            received = self.receive([view])
            view = view[received:]
            if not received:
                self.wait(select.POLLIN, deadline)
        return data

    # --- messages ---------------------------------------------------------------------------------

    def recv_frame(self, deadline: float) -> bytearray:
        """Return the next frame's payload."""
        length = self.recv_exact(LENGTH_BYTES, deadline)
        rest = self.recv_exact(CHECK_BYTES + frame_length(length), deadline)
        return unframe(length + rest)

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        self.send_all(frame(encode(message)), deadline)

    def recv(self, message_type: type[T], deadline: float) -> T:
        return decode(self.recv_frame(deadline), message_type)
