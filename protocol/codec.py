"""Encoding of messages, and bounded decoding."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from protocol.errors import ProtocolError
from protocol.router_to_worker import RouterToWorker
from protocol.worker_to_router import RegisterHeader, WorkerToRouter
from protocol.worker_to_worker import PeerReply, PeerRequest

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class BoundedDecoder(Generic[T]):
    """A decoder of one channel's messages. It raises `ProtocolError` for anything else."""

    def __init__(self, message_type: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def decode(self, raw: bytes | memoryview) -> T:
        if len(raw) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(raw)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(str(error)) from error


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


router_to_worker: BoundedDecoder[RouterToWorker] = BoundedDecoder(RouterToWorker)
worker_to_router: BoundedDecoder[WorkerToRouter] = BoundedDecoder(WorkerToRouter)
introduction: BoundedDecoder[RegisterHeader] = BoundedDecoder(RegisterHeader)
peer_request: BoundedDecoder[PeerRequest] = BoundedDecoder(PeerRequest)
peer_reply: BoundedDecoder[PeerReply] = BoundedDecoder(PeerReply)
