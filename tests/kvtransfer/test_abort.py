"""After `Sender.abort` returns no source block is read any more, or what is read is never believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer import Completed, Failed, Progress
from kvtransfer.framing.messages import SPOILED, Ack
from kvtransfer.transports.registry import TransportOptions
from tests.kvtransfer.transfer_sides import (
    RawReceiver,
    ReceiverEnd,
    SenderEnd,
    is_over,
    make_pool,
    wait_until,
)

Closing = Callable[[Any], Any]
MIB = 1024 * 1024


def test_tcp_pads_the_piece_that_was_on_its_way(closing: Closing) -> None:
    size = 24 * MIB  # more than all socket buffers hold
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


def test_shm_waits_for_the_reader(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm"], make_pool(4, MIB), abort_timeout_s=20))
    raw_receiver = closing(RawReceiver("shm", make_pool(4, MIB)))
    sender.push(raw_receiver.peer, "lease", [0])
    raw = closing(raw_receiver.accept())
    piece = raw_receiver.piece(raw)

    aborting = threading.Thread(target=sender.sender.abort, args=("lease",))
    aborting.start()
    aborting.join(0.2)
    assert aborting.is_alive(), "the peer may still be reading"
    raw.send(Ack(piece.sequence))
    aborting.join(5)
    assert not aborting.is_alive()
    assert sender.sender.poll() == []


def test_shm_cuts_off_a_reader_that_does_not_answer(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm"], make_pool(4, MIB), abort_timeout_s=0.2))
    raw_receiver = closing(RawReceiver("shm", make_pool(4, MIB)))
    sender.push(raw_receiver.peer, "lease", [0])
    sender.push(raw_receiver.peer, "other", [1], final=False)
    raw = closing(raw_receiver.accept())
    raw_receiver.piece(raw)
    sender.sender.abort("lease")
    with pytest.raises(ConnectionError):
        raw.send(Ack(1))  # what was read after the abort can't be acknowledged, so it never counts
    assert isinstance(sender.wait_lease("other"), Failed)
    assert sender.sender.counters()["failures_abort_timeout"] == 1


def test_aborts_in_a_stream_of_pieces_leave_only_believed_blocks(closing: Closing, transport: str) -> None:
    """Blocks reported in place were read before the abort, never after it."""
    count, size = 48, 256 * 1024
    sender = closing(SenderEnd([transport], make_pool(count, size)))
    receiver = closing(ReceiverEnd([transport], make_pool(count, size)))
    for number in range(10):
        lease = f"lease-{number}"
        sender.pool.buffer[:] = b"\x11" * count * size
        receiver.pool.buffer[:] = bytes(count * size)
        receiver.open(lease, range(count))
        sender.push(receiver.peer, lease, range(count))
        wait_until(lambda: any(receiver.pool.buffer[:: size // 2]))
        sender.sender.abort(lease)
        sender.sender.abort(lease)
        sender.pool.buffer[:] = b"\x99" * count * size
        receiver.open(f"check-{number}", [])
        sender.push(receiver.peer, f"check-{number}", [])
        events = receiver.wait_for(lambda event, n=number: event.lease_id == f"check-{n}" and is_over(event))
        assert b"\x99" not in bytes(receiver.pool.buffer)
        believed = max((e.blocks_received for e in events if isinstance(e, Progress)), default=0)
        assert bytes(receiver.pool.buffer[: believed * size]) == b"\x11" * believed * size
        assert all(event.lease_id != lease for event in sender.wait_for())
        receiver.receiver.close_lease(lease)


def test_a_lease_may_be_aborted_before_it_is_pushed(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["tcp"])), closing(ReceiverEnd(["tcp"]))
    receiver.open("lease", [1])
    sender.sender.abort("lease")
    sender.push(receiver.peer, "lease", [1])
    assert isinstance(sender.wait_lease("lease"), Completed)


def test_an_abort_while_the_wire_breaks_sends_nothing_again(closing: Closing) -> None:
    count, size = 48, 256 * 1024
    sender = closing(SenderEnd(["tcp"], make_pool(count, size), TransportOptions(tcp_streams=2)))
    receiver = closing(ReceiverEnd(["tcp"], make_pool(count, size)))
    for number in range(10):
        lease, check = f"lease-{number}", f"check-{number}"
        sender.pool.buffer[:] = b"\x11" * count * size
        receiver.pool.buffer[:] = bytes(count * size)
        receiver.open(lease, range(count))
        sender.push(receiver.peer, lease, range(count))
        wait_until(lambda: any(receiver.pool.buffer[:: size // 2]))
        (link,) = sender.sender._links.values()
        for stream in list(link._streams):
            stream._channel.shutdown()
        sender.sender.abort(lease)
        sender.pool.buffer[:] = b"\x99" * count * size
        receiver.open(check, [])
        sender.push(receiver.peer, check, [])
        sender.wait_lease(check)
        receiver.wait_for(lambda event, check=check: event.lease_id == check and is_over(event))
        assert b"\x99" not in bytes(receiver.pool.buffer)
        receiver.receiver.close_lease(lease)
    assert "leases_failed" not in sender.sender.counters()
