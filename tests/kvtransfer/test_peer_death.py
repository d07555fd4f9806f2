"""A peer that is killed or frozen, in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from kvtransfer import Completed, Failed, Progress
from kvtransfer.framing.messages import Piece
from tests.kvtransfer import peer_process
from tests.kvtransfer.peer_process import BLOCK_BYTES, NUM_BLOCKS, PeerProcess
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, make_pool, moved, wait_until

Closing = Callable[[Any], Any]
PROMPT_S = 10.0
"""Under a second on an idle machine; who notices no death waits 30 s for progress."""


def pool(seed: int) -> Any:
    return make_pool(NUM_BLOCKS, BLOCK_BYTES, seed=seed)


EVERYTHING = range(NUM_BLOCKS)


def test_blocks_arrive_in_another_process(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], pool(1)))
    child = closing(PeerProcess(peer_process.receive, [transport]))
    peer = child.recv()
    child.ask("open", "lease", list(range(NUM_BLOCKS)))
    sender.push(peer, "lease", EVERYTHING)
    assert isinstance(sender.wait_lease("lease"), Completed)
    assert child.ask("pool") == bytes(sender.pool.buffer)


def test_killing_the_receiver_fails_leases_and_its_successor_works(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], pool(1)))
    child = closing(PeerProcess(peer_process.receive, [transport]))
    peer = child.recv()
    for lease, blocks in (("busy", range(32)), ("waiting", range(32, 64))):
        child.ask("open", lease, list(blocks))
        sender.push(peer, lease, [blocks[0]], final=False)
    sender.wait_for(lambda event: event.lease_id == "waiting")
    for _ in range(40):
        sender.push(peer, "busy", range(32), final=False)
    child.signal(signal.SIGKILL)
    killed = time.monotonic()
    failed: set[str] = set()
    while failed != {"busy", "waiting"}:
        events = sender.wait_for(lambda event: isinstance(event, Failed), PROMPT_S)
        failed |= {event.lease_id for event in events if isinstance(event, Failed)}
    assert time.monotonic() - killed < PROMPT_S
    child.close()
    sender.push(peer, "late", [0])
    assert "refused" in sender.wait_lease("late").reason

    successor = closing(PeerProcess(peer_process.receive, [transport]))
    peer = successor.recv()
    successor.ask("open", "busy", list(range(NUM_BLOCKS)))
    sender.push(peer, "busy", EVERYTHING)
    assert isinstance(sender.wait_lease("busy"), Completed)
    assert successor.ask("pool") == bytes(sender.pool.buffer)


def test_killing_the_sender_fails_its_leases_alone(closing: Closing, transport: str) -> None:
    receiver = closing(ReceiverEnd([transport], pool(2), reconnect_grace_s=0.3))
    survivor = closing(SenderEnd([transport], pool(3)))
    child = closing(PeerProcess(peer_process.send, [transport]))
    receiver.open("lease", range(NUM_BLOCKS - 1))
    receiver.open("whole", [NUM_BLOCKS - 1])
    survivor.push(receiver.peer, "whole", [0], final=False)
    receiver.wait_for(lambda event: event.lease_id == "whole")
    receiver.receiver.close_lease("lease")
    receiver.receiver.close_lease("whole")
    receiver.open("lease", range(NUM_BLOCKS))
    child.pipe.send((receiver.peer, "lease"))
    receiver.wait_for(lambda event: isinstance(event, Progress) and event.lease_id == "lease")

    child.signal(signal.SIGKILL)
    killed = time.monotonic()
    receiver.wait_for(lambda event: isinstance(event, Failed) and event.lease_id == "lease", PROMPT_S)
    assert time.monotonic() - killed < PROMPT_S
    receiver.receiver.close_lease("lease")
    receiver.open("next", range(NUM_BLOCKS))
    survivor.push(receiver.peer, "next", EVERYTHING)
    assert receiver.wait_lease("next") == Progress("next", NUM_BLOCKS, complete=True)
    assert bytes(receiver.pool.buffer) == bytes(survivor.pool.buffer)


def test_a_frozen_receiver_is_given_up_in_bounded_time(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport], pool(1), progress_timeout_s=0.5, connect_timeout_s=0.5))
    child = closing(PeerProcess(peer_process.receive, [transport]))
    peer = child.recv()
    child.ask("open", "lease", list(range(NUM_BLOCKS)))
    sender.push(peer, "lease", [0], final=False)
    sender.wait_for(lambda event: True)
    child.signal(signal.SIGSTOP)
    sender.push(peer, "lease", EVERYTHING)
    frozen = time.monotonic()
    assert "no progress" in sender.wait_lease("lease").reason
    assert 0.4 < time.monotonic() - frozen < 15

    sender.pool.buffer[:] = b"\x77" * len(sender.pool.buffer)
    child.signal(signal.SIGCONT)
    child.ask("open", "again", [])
    sender.push(peer, "again", [])
    assert isinstance(sender.wait_lease("again"), Completed)


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
