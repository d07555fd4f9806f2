"""Broken connections and stopped peers: the transfer continues over the next transport, or fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.interface import Completed, Failed, Progress
from kvtransfer.messages import GOOD, Piece
from kvtransfer.streams.link import MAX_ATTEMPTS
from tests.kvtransfer.test_leases import BLOCK, runs
from tests.kvtransfer.transfer_sides import (
    WAIT_S,
    RawPeer,
    RawReceiver,
    ReceiverEnd,
    SenderEnd,
    cut,
    make_pool,
    moved,
)
from tests.waiting import wait_until

Closing = Callable[[Any], Any]
NUM_BLOCKS, BLOCK_BYTES = 96, 1024 * 1024


def big_pool(seed: int) -> Any:
    return make_pool(NUM_BLOCKS, BLOCK_BYTES, seed=seed)


def hold_all_but_the_first_piece(receiver: ReceiverEnd, lease_id: str) -> threading.Event:
    """Hold back all pieces but the first until the event is set: no machine is too fast then."""
    goes_on = threading.Event()
    lease = receiver.receiver._leases._leases[lease_id]
    attempt = lease.attempt

    def attempt_later(piece: Piece, deadline: float) -> Any:
        assert piece.index == 0 or goes_on.wait(WAIT_S)
        return attempt(piece, deadline)

    lease.attempt = attempt_later
    return goes_on


def push_and_cut(sender: SenderEnd, receiver: ReceiverEnd, lease: str, stream: int = 0) -> list[Any]:
    """Transfer the whole pool with a cut in the middle. Return the events up to the end."""
    receiver.open(lease, range(NUM_BLOCKS))
    goes_on = hold_all_but_the_first_piece(receiver, lease)
    sender.push(receiver.peer, lease, range(NUM_BLOCKS))
    sender.wait_for(lambda event: event.lease_id == lease)
    cut(sender, stream)
    goes_on.set()
    return sender.wait_for()


def test_the_next_transport_takes_over_during_a_lease(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm", "tcp"], big_pool(1)))
    receiver = closing(ReceiverEnd(["shm", "tcp"], big_pool(2)))
    events = push_and_cut(sender, receiver, "lease")
    assert isinstance(events[-1], Completed) and events[-1].transport == "tcp"
    assert receiver.wait_lease("lease") == Progress("lease", NUM_BLOCKS, complete=True)
    assert bytes(receiver.pool.buffer) == bytes(sender.pool.buffer)
    assert sender.sender.transports() == {"decode-0": "tcp"}
    counters = sender.sender.counters()
    assert counters["fallbacks"] == 1 and counters["pieces_sent_again"] >= 1
    sent = moved(sender.sender.pairs, "tcp", "kv_transfer_pieces_total")
    assert sent > counters["pieces_sent_again"], "a part at a time"
    assert "leases_failed" not in counters


def test_a_better_transport_is_tried_again_later(closing: Closing) -> None:
    sender = closing(SenderEnd(["shm", "tcp"], big_pool(1), retry_interval_s=0.2))
    receiver = closing(ReceiverEnd(["shm", "tcp"], big_pool(2)))
    assert isinstance(push_and_cut(sender, receiver, "lease")[-1], Completed)
    wait_until(lambda: sender.sender.transports() == {"decode-0": "shm"})
    assert sender.sender.counters()["recoveries"] == 1
    receiver.receiver.close_lease("lease")
    receiver.pool.buffer[:] = bytes(len(receiver.pool.buffer))
    receiver.open("next", range(NUM_BLOCKS))
    sender.push(receiver.peer, "next", range(NUM_BLOCKS))
    assert sender.wait_lease("next").transport == "shm"
    assert bytes(receiver.pool.buffer) == bytes(sender.pool.buffer)
    wait_until(lambda: sum(thread.name.startswith("kv-send") for thread in threading.enumerate()) == 1)


def test_the_only_transport_reconnects(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], big_pool(1)))
    receiver = closing(ReceiverEnd([transport], big_pool(2)))
    assert isinstance(push_and_cut(sender, receiver, "lease")[-1], Completed)
    assert bytes(receiver.pool.buffer) == bytes(sender.pool.buffer)
    assert sender.sender.counters()["connections_made"] == 2
    assert "fallbacks" not in sender.sender.counters()
    assert not any(isinstance(event, Failed) for event in receiver.receiver.poll())


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


PROMPT_S = 10.0
"""Under a second on an idle machine. Without noticing the death, a side would wait 30 s for progress."""


def test_an_idle_link_outlives_the_progress_timeout(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], progress_timeout_s=0.25))
    receiver = closing(ReceiverEnd([transport], progress_timeout_s=0.25))
    receiver.open("lease", [1, 2])
    sender.push(receiver.peer, "lease", [1], final=False)
    sender.wait_for(lambda event: True)
    time.sleep(0.6)
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


def test_closing_the_receiver_fails_the_senders_leases(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [1])
    sender.push(receiver.peer, "lease", [1], final=False)
    sender.wait_for(lambda event: True)
    receiver.receiver.close()
    assert isinstance(sender.wait_lease("lease", PROMPT_S), Failed)


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
