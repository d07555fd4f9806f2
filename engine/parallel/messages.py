"""The messages between rank 0 and the other ranks, and how they travel over their sockets."""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from engine.batch.step_inputs import SequenceRows
from engine.lora.files import RawAdapter
from protocol.handoff import SegmentInfo

READY = b"\0"
"""The byte that travels with a pool's file, and that answers when a rank has the pool or its runner."""

_LENGTH = struct.Struct("<I")
_Message = TypeVar("_Message")


class BuildRunners(msgspec.Struct, frozen=True):
    """An order to build runners over `num_blocks` blocks of these segments: in the pool whose memory was sent
    before, or in a pool for each rank's own heads.
    """

    num_blocks: int
    segments: list[SegmentInfo]
    hidden_layers: tuple[int, ...]
    state_window: int = 0
    """`StateLayout.window`, for a model with recurrent layers."""


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    batch: list[SequenceRows]
    logit_rows: list[int]
    wants_hidden: bool


class KeepAdapter(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An order to load an adapter into the slot that it has at rank 0. Only rank 0 reads the files in `path`.
    Answered by `AdapterKept`.
    """

    slot: int
    path: str
    raw: RawAdapter


class RankCall(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An order to call one of the functions that `follower.py` has by name."""

    name: str
    arguments: list[Any] = []


ToOthers = RunStep | KeepAdapter | RankCall


class LentPool(msgspec.Struct, frozen=True):
    """The parts of a CUDA IPC handle, with which rank 0 maps another rank's KV pool."""

    handle: list[int | bool | bytes]


class AdapterKept(msgspec.Struct, frozen=True):
    """The answer to `KeepAdapter`: `error` is "", or says why the adapter was not loaded."""

    error: str


begin: Decoder[BuildRunners] = Decoder(BuildRunners)
to_others: Decoder[ToOthers] = Decoder(ToOthers)
lent: Decoder[LentPool] = Decoder(LentPool)
answers: Decoder[AdapterKept] = Decoder(AdapterKept)


def send(link: socket.socket, message: bytes) -> None:
    link.sendall(_LENGTH.pack(len(message)) + message)


def receive(link: socket.socket, decoder: Decoder[_Message]) -> _Message | None:
    """Return the next message, or None if the other side is gone."""
    head = _read(link, _LENGTH.size)
    body = _read(link, *_LENGTH.unpack(head)) if head else b""
    return decoder.decode(body) if body else None


def receive_mapping(link: socket.socket) -> mmap.mmap | None:
    """Map the whole of a file whose descriptor comes next; None if the other side is gone."""
    _, fds, _, _ = socket.recv_fds(link, 1, 1)
    if not fds:
        return None
    try:
        return mmap.mmap(fds[0], os.fstat(fds[0]).st_size)
    finally:
        os.close(fds[0])


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert NumPy numbers, which draft tokens may be."""
    return value.item()


def _read(link: socket.socket, count: int) -> bytes:
    """Return `count` bytes, or b"" at the end of the stream."""
    data = bytearray()
    while len(data) < count:
        part = link.recv(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)
