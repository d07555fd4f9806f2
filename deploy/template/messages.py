"""What a template and its clients say to each other, over a local socket that keeps messages apart."""

from __future__ import annotations

import socket
import struct
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from protocol.codec import BoundedDecoder

MAX_MESSAGE_BYTES = 128 * 1024
MAX_REASON_CHARS = 4096

_Pid = Annotated[int, Meta(ge=1, le=2**22)]
_Status = Annotated[int, Meta(ge=0, le=2**16 - 1)]

REPORT_END = "\n"
"""Of what a worker says on its control socket when it ends by itself: why, or nothing if it was asked to."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Fork a worker. Its control socket comes with the message, then its stderr if it has its own."""

    launch: bytes
    environment: dict[str, str]


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    pid: _Pid


class SpawnFailed(msgspec.Struct, frozen=True, tag="failed"):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker's process ended; `status` is as from `os.waitpid`."""

    pid: _Pid
    status: _Status


TemplateReply = Spawned | SpawnFailed | Ended

template_request: BoundedDecoder[Spawn] = BoundedDecoder(Spawn)
template_reply: BoundedDecoder[TemplateReply] = BoundedDecoder(TemplateReply)


class Peer(NamedTuple):
    """The process at the other end of a connection: each side tells its secrets to its own user alone."""

    pid: int
    user: int


def peer_of(connection: socket.socket) -> Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", credentials)[:2])
