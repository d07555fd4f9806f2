"""SIGKILL to either side at every named point of the protocol.

A dead peer must be noticed by its connection: the time-outs are longer than the tests wait.
"""

from __future__ import annotations

import pytest

from tests.faults.arena import ORPHAN_S, Arena, cases
from tests.faults.points import RECEIVER_POINTS, SENDER_POINTS

SENDER_OVER_UCX = ["verdict received", "piece begins", "piece sent"]
RECEIVER_OVER_UCX = ["reader ready", "mid read", "ack due"]


@pytest.mark.parametrize(("point", "transport"), cases(SENDER_POINTS, ucx=SENDER_OVER_UCX))
def test_the_sender_is_killed(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    sender.arm(point, "KILL")
    request = arena.begin(sender, receiver)
    sender.wait_at(point)
    arena.finish(request, deadline_s=ORPHAN_S)
    assert point == "completed" or request.received in ("failed", "expired")
    arena.check(receiver)


@pytest.mark.parametrize(
    ("point", "transport"),
    [*cases(RECEIVER_POINTS, ucx=RECEIVER_OVER_UCX), ("converting", "tcp"), ("converted", "shm")],
)
def test_the_receiver_is_killed(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, "KILL")
    request = arena.begin(sender, receiver)
    arena.finish(request)
    receiver.wait_at(point)
    assert request.sent == "failed" or point in ("told", "closing", "closed")
    arena.check(sender)


@pytest.mark.parametrize(("point", "transport"), [("piece sent", "tcp"), ("ack read", "shm")])
def test_the_other_sender_continues_when_one_of_two_is_killed(arena: Arena, point: str) -> None:
    doomed, other = arena.sender("prefill-0"), arena.sender("prefill-1")
    receiver = arena.receiver()
    doomed.arm(point, "KILL", 2)
    requests = [arena.begin(doomed, receiver, 48), arena.begin(other, receiver, 48)]
    doomed.wait_at(point)
    arena.finish(*requests, deadline_s=2.0)
    assert (requests[0].received, requests[1].received) == ("failed", "completed")
    arena.check(other, receiver)


@pytest.mark.parametrize(("point", "transport"), [("piece admitted", "shm"), ("ack sent", "tcp")])
def test_the_other_receiver_continues_when_one_of_two_is_killed(arena: Arena, point: str) -> None:
    sender = arena.sender()
    doomed, other = arena.receiver("decode-0"), arena.receiver("decode-1")
    doomed.arm(point, "KILL", 2)
    requests = [arena.begin(sender, doomed), arena.begin(sender, other)]
    arena.finish(*requests)
    doomed.wait_at(point)
    assert (requests[0].sent, requests[1].received) == ("failed", "completed")
    arena.check(sender, other)
