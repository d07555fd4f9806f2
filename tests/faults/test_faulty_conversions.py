"""Faults while blocks of another dtype are converted through a staging area."""

from __future__ import annotations

import pytest

from tests.faults.arena import ORPHAN_S, Arena
from tests.faults.points import Action
from tests.faults.sides import HASTY


@pytest.fixture
def arena(arena: Arena) -> Arena:
    arena.converting = True
    return arena


@pytest.mark.parametrize(("point", "transport"), [("piece sent", "shm"), ("ack read", "tcp")])
def test_the_sender_is_killed(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    sender.arm(point, "KILL", 2)
    request = arena.begin(sender, receiver, 48)
    sender.wait_at(point)
    arena.finish(request, deadline_s=ORPHAN_S)
    assert request.received == "failed"
    arena.check(receiver)


@pytest.mark.parametrize(
    ("point", "action", "transport"),
    [
        ("converting", "KILL", "tcp"),
        ("converted", "KILL", "shm"),
        ("converting", "STOP", "shm"),
        ("converted", "STOP", "tcp"),
    ],
)
def test_the_receiver_is_killed_or_frozen(arena: Arena, point: str, action: Action) -> None:
    sender, receiver = arena.sender(**HASTY if action == "STOP" else {}), arena.receiver()
    receiver.arm(point, action, 2)
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    if action == "STOP":
        receiver.await_frozen()
    arena.finish(request)
    assert request.sent == "failed"
    arena.check(sender)


@pytest.mark.parametrize(("point", "transport"), [("converting", "tcp"), ("converted", "shm")])
def test_a_lease_expires_during_a_conversion(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, "HOLD", 2)
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    receiver.ask("expire", request.lease_id)
    receiver.go_on()
    arena.finish(request)
    assert request.sent == "failed"
    arena.check(sender, receiver)


@pytest.mark.parametrize(("point", "transport"), [("converting", "shm"), ("in place", "tcp")])
def test_every_connection_breaks(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, "CUT", 2)
    request = arena.begin(sender, receiver)
    arena.finish(request)
    assert (request.sent, request.received) == ("completed", "completed")
    arena.check(sender, receiver)
