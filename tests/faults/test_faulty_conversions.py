"""Faults while blocks of another dtype are converted through a staging area."""

from __future__ import annotations

import pytest

from tests.faults.arena import ORPHAN_S, Arena
from tests.faults.points import Action

TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "shm"])


@pytest.fixture
def arena(arena: Arena) -> Arena:
    arena.converting = True
    return arena


@TRANSPORTS
@pytest.mark.parametrize("point", ["piece sent", "ack read"])
def test_the_sender_is_killed(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    sender.arm(point, "KILL", 2)
    request = arena.begin(sender, receiver, 48)
    sender.wait_at(point)
    arena.finish(request, deadline_s=ORPHAN_S)
    assert request.received == "failed"
    arena.check(receiver)


@TRANSPORTS
@pytest.mark.parametrize("action", ["KILL", "STOP"])
@pytest.mark.parametrize("point", ["converting", "converted"])
def test_the_receiver_is_killed_or_frozen(arena: Arena, point: str, action: Action) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, action, 2)
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    if action == "STOP":
        receiver.await_frozen()
    arena.finish(request)
    assert request.sent == "failed"
    arena.check(sender)


@TRANSPORTS
@pytest.mark.parametrize("point", ["piece admitted", "converting", "converted"])
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


@TRANSPORTS
@pytest.mark.parametrize("point", ["converting", "in place"])
def test_every_connection_breaks(arena: Arena, point: str) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, "CUT", 2)
    request = arena.begin(sender, receiver)
    arena.finish(request)
    assert (request.sent, request.received) == ("completed", "completed")
    arena.check(sender, receiver)
