"""What rank 0 says to the others, and how it travels over their sockets."""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec

from engine.rows import SequenceRows
from protocol.handoff import SegmentInfo

READY = b"\0"
"""All that the others say to rank 0: they have the pool, and then, their runner."""

_LENGTH = struct.Struct("<I")
_Message = TypeVar("_Message")


class Begin(msgspec.Struct, frozen=True):
    """All ranks are to build their runners over the pool, `num_blocks` of these segments, whose memory came
    before.
    """

    num_blocks: int
    segments: list[SegmentInfo]
    hidden_layers: tuple[int, ...]


class RunStep(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `Runner.run`."""

    batch: list[SequenceRows]
    logit_rows: list[int]
    wants_hidden: bool


def send(link: socket.socket, message: bytes) -> None:
    link.sendall(_LENGTH.pack(len(message)) + message)


def receive(link: socket.socket, kind: type[_Message]) -> _Message | None:
    """The next message; None where rank 0 is gone."""
    head = _read(link, _LENGTH.size)
    body = _read(link, *_LENGTH.unpack(head)) if head else b""
    return msgspec.msgpack.decode(body, type=kind) if body else None


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Of NumPy's numbers, which drafts may have."""
    return value.item()


def _read(link: socket.socket, count: int) -> bytes:
    """Empty at the end of the stream."""
    data = bytearray()
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
