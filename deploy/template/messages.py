"""The messages between a template and its clients, over a local socket that keeps message boundaries."""

from __future__ import annotations

import socket
import struct
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig

MAX_MESSAGE_BYTES = 128 * 1024
MAX_REASON_CHARS = 4096

_Pid = Annotated[int, Meta(ge=1, le=2**22)]
_Status = Annotated[int, Meta(ge=0, le=2**16 - 1)]

REPORT_END = "\n"
"""Ends the report that a worker sends on its control socket: the reason for its end, or "" if it ended on
request.
"""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Fork a worker. The message carries the worker's control socket, and its stderr if it has its own."""

    launch: bytes
    environment: dict[str, str]


class Preload(msgspec.Struct, frozen=True, tag="preload"):
    """Load this configuration's model now, for workers to come. There is no answer."""

    config: ServeConfig


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    pid: _Pid


class SpawnFailed(msgspec.Struct, frozen=True, tag="failed"):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker's process ended. `status` is that of `os.waitpid`."""

    pid: _Pid
    status: _Status


TemplateReply = Spawned | SpawnFailed | Ended

template_request: BoundedDecoder[Spawn | Preload] = BoundedDecoder(Spawn | Preload)
template_reply: BoundedDecoder[TemplateReply] = BoundedDecoder(TemplateReply)


class Peer(NamedTuple):
    """The process at the other end of a connection. Each side sends secrets only to its own user."""

    pid: int
    user: int


def peer_of(connection: socket.socket) -> Peer:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", credentials)[:2])
