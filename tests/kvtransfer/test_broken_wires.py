"""Broken connections, damaged pieces, stopped peers, aborts: no bad byte is used."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvtransfer.streams.connection
from kvtransfer.blocks.extents import BlockIndices, Mode
from kvtransfer.interface import Completed, Failed, Progress, RegisteredPool
from kvtransfer.lease import WriteGate
from kvtransfer.messages import GOOD, SPOILED, Ack, Channel, Piece, PieceRefusal
from kvtransfer.streams.link import MAX_ATTEMPTS, Link
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.shm import ShmReader
from kvtransfer.transports.tcp import TcpReader
from kvtransfer.transports.ucx_reader import Words
from messaging.wake import Wake
from tests.kvtransfer.test_leases import BLOCK, runs
from tests.kvtransfer.test_unlike_pools import pool as meaningful_pool
from tests.kvtransfer.test_unlike_pools import tokens_of
from tests.kvtransfer.transfer_sides import (
    RawPeer,
    RawReceiver,
    ReceiverEnd,
    SenderEnd,
    block,
    make_pool,
    moved,
)
from tests.waiting import wait_until

Closing = Callable[[Any], Any]


def test_a_transport_that_breaks_at_every_try_fails_the_lease(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport]))
    raw_receiver = closing(RawReceiver(transport, make_pool()))
    sender.push(raw_receiver.peer, "lease", [0])
    for _ in range(MAX_ATTEMPTS):
        raw = raw_receiver.accept()
        assert raw_receiver.piece(raw).index == 0
        raw.close()
    event = sender.wait_lease("lease")
    assert isinstance(event, Failed)
    assert any(
        reason in event.reason for reason in ("closed the connection", "Connection reset", "Broken pipe")
    )
    assert sender.sender.counters()["pieces_sent_again"] == MAX_ATTEMPTS - 1


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_piece_whose_ack_was_lost_is_acknowledged_again(closing: Closing, is_closed: bool) -> None:
    """Even if the request has been taken over since, and its blocks hold newer tokens."""
    receiver = closing(ReceiverEnd(["tcp"]))
    source = make_pool(seed=3)
    receiver.open("lease", [4, 5])
    for attempt in range(2):
        raw = closing(RawPeer.connect(receiver, "tcp", source))
        raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 2)), True, attempt=attempt))
        raw.send_bytes(bytes([attempt]) * 2 * BLOCK + GOOD)
        assert raw.ack().error == ""
        raw.close()
        receiver.wait_for(
            lambda event: isinstance(event, Progress) and event.complete
        ) if not attempt else None
        if is_closed:
            assert receiver.receiver.close_lease("lease")
    expected = 0 if is_closed else 1
    assert receiver.pool.buffer[4 * BLOCK] == receiver.pool.buffer[6 * BLOCK - 1] == expected


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_late_connection_does_not_write_a_piece_that_was_sent_again(
    closing: Closing, transport: str
) -> None:
    """A broken connection's thread may reach its last piece long after the sender has reused the blocks."""
    receiver = closing(ReceiverEnd([transport]))
    source = make_pool(seed=3)
    late, raw = (closing(RawPeer.connect(receiver, transport, source)) for _ in range(2))
    receiver.open("lease", [4])
    sent = bytes(source.buffer[:BLOCK])
    raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True, attempt=1))
    if transport == "tcp":
        raw.send_bytes(sent + GOOD)
    assert raw.ack().error == ""
    source.buffer[:BLOCK] = bytes(BLOCK)
    late.send(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True, attempt=0))
    if transport == "tcp":
        late.send_bytes(bytes(BLOCK) + GOOD)
    assert late.ack().error == "a later attempt at the piece has begun"
    assert bytes(receiver.pool.buffer[4 * BLOCK : 5 * BLOCK]) == sent


def test_a_sender_that_reconnects_in_time_is_not_given_up(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"], reconnect_grace_s=1.0))
    receiver.open("back", [1, 2])
    receiver.open("gone", [3, 4])
    source = make_pool()
    raw = closing(RawPeer.connect(receiver, "tcp", source))
    other = closing(RawPeer.connect(receiver, "tcp", source, incarnation="raw-2"))
    for peer, lease in ((raw, "back"), (other, "gone")):
        peer.send(Piece(1, lease, 0, 1, runs((0, 0, 1)), False))
        peer.send_bytes(bytes(BLOCK) + GOOD)
        assert peer.ack().error == ""
        peer.close()
    again = closing(RawPeer.connect(receiver, "tcp", source))
    assert receiver.wait_for(lambda event: isinstance(event, Failed))[-1] == Failed(
        "gone", "the sender is gone"
    )
    again.send(Piece(1, "back", 1, 1, runs((1, 1, 1)), True))
    again.send_bytes(bytes(BLOCK) + GOOD)
    assert receiver.wait_for() == [Progress("back", 2, complete=True)]


def test_a_peer_that_always_disconnects_is_not_retried_for_ever(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport]))
    raw_receiver = closing(RawReceiver(transport, make_pool()))
    sender.sender.connect(raw_receiver.peer)
    for _ in range(MAX_ATTEMPTS):
        raw_receiver.accept().close()
    wait_until(lambda: not sender.sender._links)
    assert sender.sender.counters()["connections_made"] == MAX_ATTEMPTS
    sender.push(raw_receiver.peer, "lease", [0])
    raw = closing(raw_receiver.accept())
    assert raw_receiver.piece(raw).index == 0, "a new push is a new beginning"


def test_an_idle_link_outlives_the_progress_timeout(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], progress_timeout_s=1.0))
    receiver = closing(ReceiverEnd([transport], progress_timeout_s=1.0))
    receiver.open("lease", [1, 2])
    sender.push(receiver.peer, "lease", [1], final=False)
    sender.wait_for(lambda event: True)
    time.sleep(1.5)
    sender.push(receiver.peer, "lease", [2], 1)
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert sender.sender.counters()["connections_made"] == 1


def test_a_sender_that_stops_within_a_piece_is_given_up(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"], progress_timeout_s=0.3, reconnect_grace_s=0.1))
    raw = closing(RawPeer.connect(receiver, "tcp", make_pool()))
    receiver.open("lease", [1])
    raw.send(Piece(1, "lease", 0, 1, runs((0, 0, 1)), True))
    raw.send_bytes(b"x" * 100)
    event = receiver.wait_lease("lease")
    assert event == Failed("lease", "the sender is gone")
    assert receiver.receiver.counters()["failures_timeout"] == 1


def test_pushes_after_a_failure_are_ignored_until_it_is_polled(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    sender.push(receiver.peer, "lease", [1], final=False)
    wait_until(lambda: sender.sender.counters().get("leases_failed") == 1)
    receiver.open("lease", [2])
    sender.push(receiver.peer, "lease", [2])
    assert sender.wait_for() == [Failed("lease", "unknown lease")]
    receiver.open("last", [])
    sender.push(receiver.peer, "last", [])
    assert isinstance(sender.wait_lease("last"), Completed)
    assert moved(sender.sender.pairs, transport, "kv_transfer_pieces_total") == 1


READERS: dict[str, Any] = {"shm": ShmReader, "tcp": TcpReader}
NUM_BLOCKS = 8


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch, transport: str) -> Callable[[int], None]:
    """Return `damage(n)`, which damages the first block of the next n pieces on the way."""
    reader = READERS[transport]
    read = reader.read
    left = 0

    def damaging(self: Any, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        nonlocal left
        in_place = bool(read(self, sources, targets, gate))
        if in_place and left:
            left -= 1
            target: RegisteredPool = self._pool
            start = int(targets[0]) * target.block_bytes
            target.buffer[start : start + target.block_bytes] = bytes(target.block_bytes)
        return in_place

    def begin(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(reader, "read", damaging)
    return begin


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_damaged_piece_is_sent_again(
    closing: Closing, transport: str, damage: Callable[[int], None], mode: Mode
) -> None:
    sender = closing(SenderEnd([transport], make_pool(seed=1), checksum=mode))
    receiver = closing(ReceiverEnd([transport], make_pool(seed=2)))
    receiver.open("lease", range(NUM_BLOCKS))
    damage(MAX_ATTEMPTS - 1)
    sender.push(receiver.peer, "lease", range(20, 20 + NUM_BLOCKS))
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert receiver.wait_for() == [Progress("lease", NUM_BLOCKS, complete=True)]
    for index in range(NUM_BLOCKS):
        assert block(receiver.pool, index) == block(sender.pool, 20 + index)
    assert sender.sender.counters()["pieces_sent_again"] == MAX_ATTEMPTS - 1
    for side in (sender.sender, receiver.receiver):
        assert side.counters()["failures_checksum_mismatch"] == MAX_ATTEMPTS - 1
    assert sender.sender.counters()["connections_made"] == 1


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_a_connection_that_always_damages_only_fails_the_lease(
    closing: Closing, transport: str, damage: Callable[[int], None], mode: Mode
) -> None:
    sender = closing(SenderEnd([transport], make_pool(seed=1), checksum=mode))
    receiver = closing(ReceiverEnd([transport], make_pool(seed=2)))
    receiver.open("lease", range(NUM_BLOCKS))
    damage(MAX_ATTEMPTS)
    sender.push(receiver.peer, "lease", range(NUM_BLOCKS))
    assert sender.wait_lease("lease") == Failed("lease", PieceRefusal.CHECKSUM_MISMATCH)
    assert receiver.receiver.poll() == []
    receiver.open("next", [60])
    sender.push(receiver.peer, "next", [3])
    assert isinstance(sender.wait_lease("next"), Completed)
    assert block(receiver.pool, 60) == block(sender.pool, 3)


@pytest.mark.parametrize("wire_dtype", ["auto", "int8", "fp8"])
def test_checksums_are_checked_before_conversion(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, wire_dtype: str
) -> None:
    source_pool, source = meaningful_pool("bfloat16")
    target_pool, target = meaningful_pool("float32")
    source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(1)))
    read, left = TcpReader.read, [1]

    def damaging(self: Any, sources: BlockIndices, targets: BlockIndices, gate: WriteGate) -> bool:
        in_place = read(self, sources, targets, gate)
        if left:
            left.pop()
            self._pool.buffer[7] ^= 0x40
        return in_place

    monkeypatch.setattr(TcpReader, "read", damaging)
    options = TransportOptions(wire_dtype=wire_dtype)
    sender = closing(SenderEnd(["tcp"], source_pool, options, checksum="full"))
    receiver = closing(ReceiverEnd(["tcp"], target_pool))
    receiver.open("lease", range(4))
    sender.push(receiver.peer, "lease", [5, 3, 4, 9])
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert receiver.receiver.counters()["failures_checksum_mismatch"] == 1
    sent, arrived = tokens_of(source, [5, 3, 4, 9]), tokens_of(target, list(range(4)))
    tolerance = {"auto": 0.0, "int8": 0.04, "fp8": 0.25}[wire_dtype]
    assert (arrived - sent).abs().max() <= tolerance


def test_an_announced_checksum_must_come(closing: Closing) -> None:
    receiver = closing(ReceiverEnd(["tcp"]))
    raw = closing(RawPeer.connect(receiver, "tcp", make_pool(), checksum="full"))
    receiver.open("lease", [1])
    for sequence, checksum in enumerate((None, bytes(8)), 1):
        raw.send(Piece(sequence, "lease", 0, 1, runs((0, 0, 1)), True, checksum, attempt=sequence))
        raw.send_bytes(bytes(BLOCK) + GOOD)
        assert raw.ack() == Ack(sequence, PieceRefusal.CHECKSUM_MISMATCH, again=True)
    assert receiver.receiver.poll() == []


def test_a_damaged_piece_of_a_closed_lease_does_not_count(
    closing: Closing, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """The lease is closed between the piece's last byte and its check."""
    sender = closing(SenderEnd([transport], checksum="full"))
    receiver = closing(ReceiverEnd([transport], make_pool()))
    receiver.open("lease", [1])

    def closing_checksum(*arguments: Any) -> bytes:
        receiver.receiver.close_lease("lease")
        return bytes(8)

    monkeypatch.setattr(kvtransfer.streams.connection, "piece_checksum", closing_checksum)
    sender.push(receiver.peer, "lease", [5])
    assert sender.wait_lease("lease") == Failed("lease", PieceRefusal.UNKNOWN_LEASE)
    assert receiver.receiver.poll() == []


MIB = 1024 * 1024


def test_tcp_pads_a_piece_that_is_being_sent(closing: Closing) -> None:
    size = 24 * MIB  # larger than all socket buffers
    pool = make_pool(2, size)
    pool.buffer[:] = b"\x11" * len(pool.buffer)
    sender = closing(SenderEnd(["tcp"], pool, abort_timeout_s=30))
    raw_receiver = closing(RawReceiver("tcp", make_pool(2, size)))
    sender.push(raw_receiver.peer, "lease", [0, 1])
    raw = closing(raw_receiver.accept())
    first = raw_receiver.piece(raw)
    start = raw.channel.recv_exact(MIB, raw.deadline())

    began = time.monotonic()
    sender.sender.abort("lease")
    assert time.monotonic() - began < 15
    pool.buffer[:] = b"\x99" * len(pool.buffer)
    rest = raw.channel.recv_exact(size - MIB, raw.deadline())
    trailer = raw.channel.recv_exact(len(SPOILED), raw.deadline())

    assert start == b"\x11" * MIB
    assert b"\x99" not in rest
    assert b"\x00" in rest
    assert trailer == SPOILED
    raw.send(Ack(first.sequence))
    sender.push(raw_receiver.peer, "next", [0])
    following = raw_receiver.piece(raw)
    assert following.lease_id == "next", "the connection should survive, without further pieces of the lease"
    assert raw.channel.recv_exact(size, raw.deadline()) == b"\x99" * size
    assert sender.sender.poll() == []


def piece_being_read(closing: Closing) -> tuple[SenderEnd, RawReceiver, RawPeer, Piece]:
    """Return a lease whose only piece is announced over `shm` and not acknowledged yet."""
    sender = closing(SenderEnd(["shm"], make_pool(4, MIB), abort_timeout_s=20))
    raw_receiver = closing(RawReceiver("shm", make_pool(4, MIB)))
    sender.push(raw_receiver.peer, "lease", [0])
    raw = closing(raw_receiver.accept())
    return sender, raw_receiver, raw, raw_receiver.piece(raw)


def test_shm_waits_for_the_reader(closing: Closing) -> None:
    sender, _, raw, piece = piece_being_read(closing)

    aborting = threading.Thread(target=sender.sender.abort, args=("lease",))
    aborting.start()
    aborting.join(0.2)
    assert aborting.is_alive(), "the peer may still be reading"
    raw.send(Ack(piece.sequence))
    aborting.join(5)
    assert not aborting.is_alive()
    assert sender.sender.poll() == []


def test_shm_disconnects_a_reader_that_does_not_answer(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm"], make_pool(4, MIB), abort_timeout_s=0.2))
    raw_receiver = closing(RawReceiver("shm", make_pool(4, MIB)))
    sender.push(raw_receiver.peer, "lease", [0])
    sender.push(raw_receiver.peer, "other", [1], final=False)
    raw = closing(raw_receiver.accept())
    raw_receiver.piece(raw)
    sender.sender.abort("lease")
    with pytest.raises(ConnectionError):
        raw.send(Ack(1))  # the data read after the abort cannot be acknowledged, so it never counts
    assert isinstance(sender.wait_lease("other"), Failed)
    assert sender.sender.counters()["failures_abort_timeout"] == 1


def test_a_lease_may_be_aborted_before_it_is_pushed(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["tcp"])), closing(ReceiverEnd(["tcp"]))
    receiver.open("lease", [1])
    sender.sender.abort("lease")
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(sender.wait_lease("lease"), Completed)


class SlowToClose(socket.socket):
    """A channel whose descriptor stays open for a while during `close`, as if the thread were preempted."""

    begun = threading.Event()
    finish = threading.Event()

    def close(self) -> None:
        descriptor = self.detach()
        self.begun.set()
        assert self.finish.wait(5)
        os.close(descriptor)


def test_a_closing_connection_is_disconnected_too() -> None:
    """The sender's time-out and the abort's may coincide, and the peer must not acknowledge afterwards."""
    ours, theirs = socket.socketpair()
    channel = Channel(SlowToClose(fileno=ours.detach()), Wake(), 1.0)
    closing = threading.Thread(target=channel.close)
    closing.start()
    assert SlowToClose.begun.wait(5)
    cutting = threading.Thread(target=channel.shutdown)
    cutting.start()
    cutting.join(0.1)
    still_there = cutting.is_alive()
    SlowToClose.finish.set()
    cutting.join(5)
    closing.join(5)
    assert still_there
    with pytest.raises(BrokenPipeError):
        theirs.send(b"an ack")
    theirs.close()


def test_a_word_is_zero_for_a_second_release_too() -> None:
    word = Words().take()
    word.write(word.token)
    begun, finish, write = threading.Event(), threading.Event(), word.write

    def slow(value: int) -> None:
        begun.set()
        assert finish.wait(5)
        write(value)

    word.write = slow
    first = threading.Thread(target=word.release)
    first.start()
    assert begun.wait(5)
    second = threading.Thread(target=word.release)
    second.start()
    second.join(0.1)
    released_early = not second.is_alive()
    finish.set()
    first.join(5)
    second.join(5)
    assert not released_early
    assert word.read() == 0


def test_a_piece_about_to_be_sent_again_is_dropped_by_an_abort(
    closing: Closing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort comes after the piece's acknowledgement was read and before the piece is queued again."""
    sender, raw_receiver, raw, piece = piece_being_read(closing)
    aborting = threading.Thread(target=sender.sender.abort, args=("lease",))
    begun, failed = threading.Event(), Link._failed

    def abort_first(link: Link, kind: str, transport: str) -> None:
        aborting.start()
        begun.set()
        aborting.join(0.2)
        failed(link, kind, transport)

    monkeypatch.setattr(Link, "_failed", abort_first)
    raw.send(Ack(piece.sequence, PieceRefusal.CHECKSUM_MISMATCH, again=True))
    assert begun.wait(5)
    aborting.join(5)
    monkeypatch.undo()
    assert not aborting.is_alive()
    sender.push(raw_receiver.peer, "next", [1])
    assert raw_receiver.piece(raw).lease_id == "next"
