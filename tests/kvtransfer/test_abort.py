"""After `Sender.abort` no source block is read any more, or what is read is never used."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.interface import Closed, Completed, Failed, Progress
from kvtransfer.messages import CHECKSUM_MISMATCH, SPOILED, Ack, Channel, Piece
from kvtransfer.streams.link import Link
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.ucx_reader import Words
from messaging.wake import Wake
from tests.kvtransfer.transfer_sides import RawPeer, RawReceiver, ReceiverEnd, SenderEnd, is_over, make_pool
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
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


@pytest.mark.parametrize(("transport", "breaks"), [("shm", False), ("tcp", False), ("tcp", True)])
def test_aborts_during_many_pieces_leave_only_valid_blocks(
    closing: Closing, transport: str, breaks: bool
) -> None:
    """Blocks reported in place were read before the abort. A broken `tcp` connection resends nothing."""
    count, size = 48, 256 * 1024
    sender = closing(SenderEnd([transport], make_pool(count, size), TransportOptions(tcp_streams=1 + breaks)))
    receiver = closing(ReceiverEnd([transport], make_pool(count, size)))
    for number in range(10):
        lease, check = f"lease-{number}", f"check-{number}"
        sender.pool.buffer[:] = b"\x11" * count * size
        receiver.pool.buffer[:] = bytes(count * size)
        receiver.open(lease, range(count))
        sender.push(receiver.peer, lease, range(count))
        wait_until(lambda: any(receiver.pool.buffer[:: size // 2]))
        (link,) = sender.sender._links.values()
        for stream in list(link._streams) if breaks else ():
            stream._channel.shutdown()
        sender.sender.abort(lease)
        sender.sender.abort(lease)
        sender.pool.buffer[:] = b"\x99" * count * size
        receiver.open(check, [])
        sender.push(receiver.peer, check, [])
        events = receiver.wait_for(lambda event, check=check: event.lease_id == check and is_over(event))
        assert b"\x99" not in bytes(receiver.pool.buffer)
        counts = [e.blocks_received for e in events if isinstance(e, Progress) and e.lease_id == lease]
        believed = max(counts, default=0)
        if not breaks:  # pieces of two connections arrive in any order
            assert bytes(receiver.pool.buffer[: believed * size]) == b"\x11" * believed * size
        assert all(event.lease_id != lease for event in sender.wait_for())
        if not receiver.receiver.close_lease(lease):  # an earlier connection still writes its data
            receiver.wait_for(lambda event, lease=lease: event == Closed(lease))
    assert "leases_failed" not in sender.sender.counters()


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

    word.write = slow  # type: ignore[method-assign]
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
    raw.send(Ack(piece.sequence, CHECKSUM_MISMATCH, again=True))
    assert begun.wait(5)
    aborting.join(5)
    monkeypatch.undo()
    assert not aborting.is_alive()
    sender.push(raw_receiver.peer, "next", [1])
    assert raw_receiver.piece(raw).lease_id == "next"
