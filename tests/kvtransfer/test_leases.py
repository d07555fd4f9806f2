"""Writes happen only under open leases, whatever a sender says, and nonsense costs only its connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import kvtransfer.lease
from kvtransfer.blocks.extents import from_wire
from kvtransfer.interface import Closed, Completed, Failed, Progress
from kvtransfer.lease import LeaseTable, PieceArrival
from kvtransfer.messages import GOOD, PREFIX_BYTES, SPOILED, Ack, Piece, encode, frame, unframe
from kvtransfer.receiver import Receiver
from protocol.errors import ProtocolError
from protocol.handoff import Extent
from tests.kvtransfer.transfer_sides import (
    RawPeer,
    RawReceiver,
    ReceiverEnd,
    SenderEnd,
    block,
    make_pool,
    push_one,
)
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
BLOCK = 4096


def runs(*triples: tuple[int, int, int]) -> bytes:
    """Return runs in their wire format."""
    return np.array(triples, dtype="<i4").tobytes()


def content(end: ReceiverEnd) -> bytes:
    return bytes(end.pool.buffer)


def test_an_unknown_lease_fails_only_itself(
    closing: Closing, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same holds for a closed one, whose events are dropped, too, and of which no warning tells."""
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("closed", [1, 2])
    sender.push(receiver.peer, "closed", [1], final=False)
    assert receiver.woken.wait(10)
    for _ in range(2):
        receiver.receiver.close_lease("closed")
    assert receiver.receiver.poll() == []
    before = content(receiver)
    for lease, first in (("closed", 1), ("nobody", 0)):
        sender.push(receiver.peer, lease, [2], first, final=False)
        assert sender.wait_lease(lease) == Failed(lease, "unknown lease")
    assert content(receiver) == before and receiver.receiver.poll() == []
    assert isinstance(push_one(sender, receiver), Completed)
    assert sender.sender.counters()["connections_made"] == 1
    for side in (sender.sender, receiver.receiver):
        assert side.counters()["failures_unknown_lease"] == 2
    (warned,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("piece ")]
    assert "of lease nobody from " in warned


@pytest.mark.parametrize(
    "outside", [[(0, 3, 1)], [(0, 0, 2)], [(0, 1, 1), (0, 2, 2)], [(0, 63, 2)], [(0, 2**31 - 2, 1)]]
)
def test_a_malicious_sender_writes_nothing_outside_of_its_lease(
    closing: Closing, transport: str, outside: list[tuple[int, int, int]]
) -> None:
    receiver = closing(ReceiverEnd([transport]))
    source = make_pool(seed=9)
    raw = closing(RawPeer.connect(receiver, transport, source))
    receiver.open("mine", [9, 4, 5], first_block=1)
    receiver.open("other", [6, 7])
    before = content(receiver)
    raw.send(Piece(1, "mine", 0, 1, runs(*outside), False))
    if transport == "tcp":
        raw.send_bytes(b"\xee" * BLOCK * sum(length for _, _, length in outside) + GOOD)
    assert raw.ack().error == "blocks outside of the lease"
    assert content(receiver) == before

    raw.send(Piece(2, "mine", 0, 1, runs((8, 1, 2)), True))
    if transport == "tcp":
        raw.send_bytes(bytes(source.buffer[8 * BLOCK : 10 * BLOCK]) + GOOD)
    assert raw.ack().error == ""
    assert block(receiver.pool, 5) == block(source, 9)
    assert content(receiver)[6 * BLOCK :] == before[6 * BLOCK :]


def test_closing_a_lease_during_a_piece_stops_the_writing(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"]))
    raw = closing(RawPeer.connect(receiver, "tcp", make_pool()))
    receiver.open("lease", range(8))
    raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 8)), True))
    raw.send_bytes(b"\xaa" * 3 * BLOCK)
    wait_until(lambda: block(receiver.pool, 2) == b"\xaa" * BLOCK)

    if not receiver.receiver.close_lease("lease"):
        receiver.wait_for(lambda event: event == Closed("lease"))
    at_close = content(receiver)
    raw.send_bytes(b"\xbb" * 5 * BLOCK + GOOD)
    assert raw.ack().error == "unknown lease"
    assert content(receiver) == at_close

    receiver.open("next", [0])
    raw.send(Piece(2, "next", 0, 1, runs((0, 0, 1)), True))
    raw.send_bytes(b"\xcc" * BLOCK + GOOD)
    assert raw.ack().error == ""
    assert block(receiver.pool, 0) == b"\xcc" * BLOCK
    assert receiver.wait_for() == [Progress("next", 1, complete=True)]


def test_a_damaged_piece_does_not_count(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"]))
    raw = closing(RawPeer.connect(receiver, "tcp", make_pool()))
    receiver.open("lease", [1])
    raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True))
    raw.send_bytes(bytes(BLOCK) + SPOILED)
    assert raw.ack().error == "given up by the sender"
    assert receiver.receiver.poll() == []


def test_an_earlier_attempt_at_a_piece_ends_before_the_next_begins() -> None:
    """It reads for a connection that was given up, so the sender may have reused the blocks since."""
    emptied: list[str] = []
    table = LeaseTable([8], 1, emptied.append)
    table.open("lease", [Extent(0, [5, 6])])
    piece = Piece(1, "lease", 0, 2, runs((0, 0, 1), (3, 1, 1)), True)
    part = Piece(2, "lease", 1, 1, runs((3, 1, 1)), True, attempt=1)
    again = msgspec.structs.replace(part, attempt=2)
    lease, refusal = table.admit(piece, from_wire(piece.runs, 8, 8)[1], "sender")
    assert lease is not None and not refusal
    first, _ = lease.attempt(piece, time.monotonic())
    assert first is not None and first.enter()
    assert lease.attempt(part, time.monotonic()) == (None, "an earlier attempt at the piece is still writing")
    assert not first.is_open and lease.gate.is_open
    ending = threading.Timer(0.1, first.leave)
    ending.start()
    second, _ = lease.attempt(again, time.monotonic() + 10)
    ending.join()
    assert second is not None and second.enter() and not first.enter()
    other = Piece(3, "lease", 2, 1, runs((4, 2, 1)), True)
    assert lease.attempt(other, time.monotonic())[0] is not None, "another part waits for nothing"
    for late in (piece, part, again):
        assert lease.attempt(late, time.monotonic()) == (None, "a later attempt at the piece has begun")
    assert second.is_open

    assert not table.close("lease") and not second.is_open
    assert emptied == []
    second.leave()
    assert emptied == ["lease"] and table.close("lease")


def test_a_closed_lease_keeps_its_blocks_until_the_last_write_ends() -> None:
    emptied: list[str] = []
    table = LeaseTable([8], 1, emptied.append)
    piece = Piece(1, "lease", 0, 1, runs((0, 0, 1)), True)
    table.open("lease", [Extent(0, [5])])
    lease, _ = table.admit(piece, np.array([0]), "sender")
    assert lease is not None and lease.gate.enter()
    for _ in range(2):
        assert not table.close("lease")
        assert table.admit(piece, np.array([0]), "sender") == (None, "unknown lease")
    with pytest.raises(ValueError, match="lease is open already"):
        table.open("lease", [Extent(0, [6])])
    with pytest.raises(ValueError, match="another open lease"):
        table.open("other", [Extent(0, [5])])
    lease.gate.leave()
    assert emptied == ["lease"] and table.close("lease")
    table.open("lease", [Extent(0, [5])])


def test_a_limited_number_of_completed_leases_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtransfer.lease, "REMEMBERED_LEASES", 3)
    table = LeaseTable([8], 1, lambda lease_id: None)

    def resent(lease_id: str) -> str | None:
        """Return why the lease refuses its piece again, or an empty string if it remembers the piece."""
        piece = Piece(1, lease_id, 0, 1, runs((0, 0, 1)), True)
        lease, refusal = table.admit(piece, np.array([0]), "sender")
        if lease is not None:
            table.record(lease, piece, np.array([0]), PieceArrival("tcp", "", 1, 0.0))
            return None
        return refusal

    for number in range(5):
        table.open(f"lease-{number}", [Extent(0, [number])])
        assert resent(f"lease-{number}") is None
        assert table.close(f"lease-{number}")
    assert [resent(f"lease-{number}") for number in range(5)] == ["unknown lease"] * 2 + [""] * 3


def test_a_lease_spans_the_block_pools_of_a_pool() -> None:
    table = LeaseTable([8, 8], 2, lambda lease_id: None)
    table.open("lease", [Extent(0, [5, 6, 7]), Extent(1, [3, 0, 1])], first_token=2, num_tokens=6)
    pieces = [
        Piece(number, "lease", number, 1, runs((0, 1, 2)), number == 1, block_pool=number)
        for number in (0, 1)
    ]
    received = []
    for piece in pieces:
        positions = from_wire(piece.runs, 8, 8)[1]
        lease, refusal = table.admit(piece, positions, "sender")
        assert lease is not None and not refusal
        done, arrival = table.record(lease, piece, positions, PieceArrival("tcp", "", 1, 0.0))
        received.append((done, arrival is not None))
    assert received == [(2, False), (4, True)]
    assert [lease.blocks[block_pool].tolist() for block_pool in (0, 1)] == [[5, 6, 7], [3, 0, 1]]
    table.open("cached ones may be shared", [Extent(0, [5]), Extent(1, [3])])
    for twice in ([Extent(0, [4]), Extent(1, [0])], [Extent(0, [4]), Extent(1, [2, 4])]):
        with pytest.raises(ValueError, match="another open lease"):
            table.open("other", twice)
    assert table.close("lease")
    table.open("other", [Extent(0, [4]), Extent(1, [0])])


def test_a_lease_without_a_length_takes_all_blocks_of_each_pool() -> None:
    """Layers with a window have fewer blocks than those that see all."""
    table = LeaseTable([8, 8], 2, lambda lease_id: None)
    table.open("lease", [Extent(0, [5, 6, 7]), Extent(1, [3, 0])], first_token=2)
    for block_pool, end in ((0, 3), (1, 2)):
        piece = Piece(1, "lease", 0, 1, runs((0, 1, 1)), False, block_pool=block_pool)
        assert table.admit(piece, np.array([end - 1]), "sender")[1] == ""
        assert table.admit(piece, np.array([end]), "sender")[1] == "blocks outside of the lease"


def test_an_unknown_block_pool_is_refused(closing: Closing) -> None:
    table = LeaseTable([8], 1, lambda lease_id: None)
    for extents in ([Extent(1, [0])], [Extent(0, [1]), Extent(0, [2])]):
        with pytest.raises(ValueError, match="block pools of lease"):
            table.open("lease", extents)
    sender, receiver = closing(SenderEnd(["tcp"])), closing(ReceiverEnd(["tcp"]))
    with pytest.raises(ValueError, match="block pool 1"):
        sender.sender.push(receiver.peer, "lease", [Extent(1, [0])], 0, 1, final=True)
    receiver.open("lease", [1])
    source, before = make_pool(seed=9), content(receiver)
    raw = closing(RawPeer.connect(receiver, "tcp", source))
    raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True, block_pool=1))
    raw.send_bytes(bytes(source.buffer[:BLOCK]) + GOOD)
    assert raw.ack().error == "a block pool that the lease does not have"
    assert content(receiver) == before


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
    assert isinstance(push_one(sender, receiver), Completed)
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
