"""An authenticated peer that sends nonsense loses its connection, and nothing else happens."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.interface import Completed, Failed
from kvtransfer.messages import PREFIX_BYTES, Ack, Piece, encode, frame, unframe
from kvtransfer.receiver import Receiver
from protocol.errors import ProtocolError
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, RawReceiver, ReceiverEnd, SenderEnd, make_pool

Closing = Callable[[Any], Any]

GOOD_MESSAGE = frame(encode(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True)))


def flip(message: bytes, bit: int) -> bytearray:
    damaged = bytearray(message)
    damaged[bit // 8] ^= 1 << bit % 8
    return damaged


BAD_MESSAGES = {
    "oversized": (2**32 - 1).to_bytes(4, "little"),
    "not msgpack": frame(b"\xc1\xc1\xc1"),
    "another message": frame(encode(Ack(1))),
    "nested deep": frame(b"\x91" * 60_000),
    "bad utf-8": frame(b"\x95\x01\xa2\xff\xfe\x00\xc4\x00\xc3"),
    "empty": frame(b""),
    "negative block": frame(encode(Piece(1, "lease", 0, 1, runs((0, -1, 1)), False))),
    "source out of range": frame(encode(Piece(1, "lease", 0, 1, runs((64, 0, 1)), False))),
    "too many blocks": frame(encode(Piece(1, "lease", 0, 1, runs(*[(0, 0, 60)] * 1000), False))),
    "torn runs": frame(encode(Piece(1, "lease", 0, 1, b"12345", False))),
    "empty lease id": frame(encode(Piece(1, "", 0, 1, runs((0, 0, 1)), False))),
    "another block by damage": bytes(flip(GOOD_MESSAGE, 8 * GOOD_MESSAGE.index(runs((0, 0, 1))))),
}


def test_any_flipped_bit_of_a_message_is_detected() -> None:
    assert unframe(bytearray(GOOD_MESSAGE)) == GOOD_MESSAGE[PREFIX_BYTES:]
    for bit in range(8 * len(GOOD_MESSAGE)):
        with pytest.raises(ProtocolError, match="damaged on the way"):
            unframe(flip(GOOD_MESSAGE, bit))


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_malformed_piece_closes_only_its_connection(closing: Closing, transport: str, name: str) -> None:
    receiver = closing(ReceiverEnd([transport]))
    sender = closing(SenderEnd([transport]))
    raw = closing(RawPeer.connect(receiver, transport, make_pool()))
    receiver.open("lease", [1])
    receiver.open("good", [2])
    before = bytes(receiver.pool.buffer)
    raw.send_bytes(BAD_MESSAGES[name])
    assert raw.is_closed_by_peer()
    assert receiver.receiver.counters()["failures_malformed"] == 1
    assert bytes(receiver.pool.buffer) == before
    sender.push(receiver.peer, "good", [2])
    assert isinstance(sender.wait_lease("good"), Completed)


def test_an_internal_error_does_not_end_the_accepting_thread(
    closing: Closing, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_one, defects = Receiver._accept_one, [RuntimeError("a defect")]

    def failing_once(*arguments: Any) -> None:
        if defects:
            raise defects.pop()
        accept_one(*arguments)

    monkeypatch.setattr(Receiver, "_accept_one", failing_once)
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [1])
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert receiver.receiver.counters()["failures_internal"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        frame(encode(Ack(7))),
        frame(encode(Ack(2))),
        frame(b"\xc1"),
        (2**31).to_bytes(4, "little"),
        frame(encode(Ack(1))) * 2,
    ],
)
def test_a_receiver_that_acknowledges_nonsense_is_dropped(
    closing: Closing, transport: str, answer: bytes
) -> None:
    sender = closing(SenderEnd([transport]))
    raw_receiver = closing(RawReceiver(transport, make_pool()))
    sender.push(raw_receiver.peer, "lease", [0], final=False)
    raw = closing(raw_receiver.accept())
    raw_receiver.piece(raw)
    raw_receiver.close()  # the sender comes again, and need not wait for an answer
    raw.send_bytes(answer)
    assert isinstance(sender.wait_for(lambda event: isinstance(event, Failed))[-1], Failed)
    assert sender.sender.counters()["failures_malformed"] == 1


def test_shm_refuses_a_pool_that_could_vanish(closing: Closing) -> None:
    """A file that the sender could truncate under us would kill us at the next read."""
    receiver = closing(ReceiverEnd(["shm"]))
    pool = make_pool()
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, pool.nbytes)
    short = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    for descriptor, problem in ((unsealed, "not sealed"), (short, "smaller")):
        raw = closing(RawPeer.connect_only(receiver, "shm"))
        raw.authenticate(receiver, "shm", pool)
        socket.send_fds(raw.channel.socket, [b"\0"], [descriptor])
        assert raw.is_closed_by_peer(), problem
        os.close(descriptor)
    raw = closing(RawPeer.connect_only(receiver, "shm"))
    raw.authenticate(receiver, "shm", pool)
    raw.send_bytes(b"\0")
    assert raw.is_closed_by_peer()
    assert receiver.receiver.counters()["failures_lost"] == 2
    assert receiver.receiver.counters()["failures_malformed"] == 1
