"""The messages between rank 0 and the other ranks, and how they travel over their sockets."""

from __future__ import annotations

import socket
import struct
from typing import Any, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from engine.batch.step_inputs import SequenceRows
from engine.lora.files import RawAdapter
from protocol.handoff import SegmentInfo

READY = b"\0"
"""The others say so to rank 0 once they have the pool, and once they have their runner."""

_LENGTH = struct.Struct("<I")
_Message = TypeVar("_Message")


class Begin(msgspec.Struct, frozen=True):
    """All ranks are to build their runners over `num_blocks` blocks of these segments: in the pool whose
    memory came before, or in pools for their own heads.
    """

    num_blocks: int
    segments: list[SegmentInfo]
    hidden_layers: tuple[int, ...]


class RunStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The arguments of `Runner.run`."""

    batch: list[SequenceRows]
    logit_rows: list[int]
    wants_hidden: bool


class KeepAdapter(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Put the adapter with this content, from `path`, into the slot that it has at rank 0, which alone reads
    files. Answered by `AdapterKept`.
    """

    slot: int
    path: str
    raw: RawAdapter


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag=2):
    slot: int


class WarmUp(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Call `Runner.warm_up`, whose padding is run by all ranks together."""


class CopyBlock(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The arguments of `KVPool.copy_block`, for ranks with pools of their own."""

    source: int
    target: int


class MoveTokens(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The arguments of `KVPool.move_tokens`, for ranks with pools of their own."""

    tables: list[list[int]]
    first: int
    places: list[int]


class LentPool(msgspec.Struct, frozen=True):
    """The parts of a CUDA IPC handle, by which rank 0 maps another rank's KV pool."""

    handle: list[int | bool | bytes]


class AdapterKept(msgspec.Struct, frozen=True):
    """A `KeepAdapter` is done, or failed with an `error`."""

    error: str


begin: Decoder[Begin] = Decoder(Begin)
to_others: Decoder[RunStep | KeepAdapter | DropAdapter | WarmUp | CopyBlock | MoveTokens] = Decoder(
    RunStep | KeepAdapter | DropAdapter | WarmUp | CopyBlock | MoveTokens
)
lent: Decoder[LentPool] = Decoder(LentPool)
answers: Decoder[AdapterKept] = Decoder(AdapterKept)


def send(link: socket.socket, message: bytes) -> None:
    link.sendall(_LENGTH.pack(len(message)) + message)


def receive(link: socket.socket, decoder: Decoder[_Message]) -> _Message | None:
    """The next message; None where the other side is gone."""
    head = _read(link, _LENGTH.size)
    body = _read(link, *_LENGTH.unpack(head)) if head else b""
    return decoder.decode(body) if body else None


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers, which drafts may have."""
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
