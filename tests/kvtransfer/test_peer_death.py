"""A peer that closes, fails or stops; `tests/faults` kills and freezes whole processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtransfer import Completed, Failed
from kvtransfer.framing.messages import Piece
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, make_pool, moved, wait_until

Closing = Callable[[Any], Any]
PROMPT_S = 10.0
"""Under a second on an idle machine; who notices no death waits 30 s for progress."""


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
