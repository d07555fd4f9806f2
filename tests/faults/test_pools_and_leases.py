"""Full pools, expiring leases and aborted requests, at every moment of a transfer."""

from __future__ import annotations

import pytest

from tests.faults.arena import Arena, needs_nixl
from tests.faults.processes import SMALL

OVER_ALL = pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("ucx", marks=needs_nixl)])
ROOM = SMALL[0]


def test_a_request_that_never_fits_is_refused(arena: Arena) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    request = arena.begin(sender, receiver, ROOM + 1)
    assert request.received == "failed" and "no room" in request.reasons
    arena.check(sender, receiver)


@OVER_ALL
def test_a_request_waits_until_another_is_over(arena: Arena) -> None:
    sender, other, receiver = arena.sender("prefill-0"), arena.sender("prefill-1"), arena.receiver()
    first = arena.begin(sender, receiver, ROOM - 10, until=40)
    refused = arena.begin(other, receiver, 40)
    assert refused.received == "failed" and "no room" in refused.reasons
    arena.push(first, first=40)
    arena.finish(first)
    assert first.received == "completed"
    arena.serve(other, receiver, 40)
    arena.check(sender, other, receiver)


@OVER_ALL
def test_a_senders_death_frees_a_full_pool(arena: Arena) -> None:
    doomed, other, receiver = arena.sender("prefill-0"), arena.sender("prefill-1"), arena.receiver()
    doomed.arm("ack read", "KILL", 2)
    lost = arena.begin(doomed, receiver, ROOM)
    assert arena.begin(other, receiver, 1).received == "failed"
    arena.finish(lost)
    assert lost.received == "failed"
    arena.serve(other, receiver, ROOM)
    arena.check(other, receiver)


@pytest.mark.parametrize(
    ("point", "transport"),
    [
        ("piece announced", "tcp"),
        ("piece admitted", "tcp"),
        ("mid receive", "tcp"),
        ("ack due", "tcp"),
        ("piece announced", "shm"),
        ("piece admitted", "shm"),
        ("mid copy", "shm"),
        ("in place", "shm"),
        pytest.param("piece admitted", "ucx", marks=needs_nixl),
        pytest.param("mid read", "ucx", marks=needs_nixl),
    ],
)
def test_a_lease_expires_at(arena: Arena, point: str) -> None:
    """The lease's blocks are not reused before the writer has left them."""
    sender, receiver = arena.sender(), arena.receiver()
    receiver.arm(point, "HOLD", 2)
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    receiver.ask("expire", request.lease_id)
    receiver.go_on()
    arena.finish(request)
    assert request.sent == "failed" and "unknown lease" in request.reasons
    arena.check(sender, receiver)


@OVER_ALL
def test_a_lease_expires_before_the_first_piece(arena: Arena) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    request = arena.reserve(sender, receiver)
    receiver.ask("expire", request.lease_id)
    arena.push(request)
    arena.finish(request)
    assert request.sent == "failed" and "unknown lease" in request.reasons
    arena.check(sender, receiver)


@OVER_ALL
def test_a_lease_expires_as_its_sender_pauses(arena: Arena) -> None:
    """The blocks already belong to another request when the remaining pieces come."""
    sender, receiver = arena.sender(), arena.receiver()
    request = arena.begin(sender, receiver, 48, until=12)
    sender.ask("await_sent", request.lease_id, 12)
    receiver.ask("expire", request.lease_id)
    other = arena.begin(sender, receiver, ROOM - 48)
    arena.push(request, first=12)
    arena.finish(request, other)
    assert (request.sent, other.sent, other.received) == ("failed", "completed", "completed")
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("point", "transport"),
    [
        ("piece announced", "tcp"),
        ("mid receive", "tcp"),
        ("ack due", "tcp"),
        ("piece announced", "shm"),
        ("mid copy", "shm"),
        ("ack due", "shm"),
        pytest.param("mid read", "ucx", marks=needs_nixl),
        pytest.param("in place", "ucx", marks=needs_nixl),
    ],
)
def test_a_request_is_aborted_at(arena: Arena, point: str) -> None:
    """The sender reuses its blocks at once, and the receiver must not believe what it reads of them.

    Over `tcp` all bytes may have been sent before.
    """
    sender = arena.sender(
        progress_timeout_s=20.0
    )  # a shorter time-out might send everything again before the abort
    receiver = arena.receiver()
    receiver.arm(point, "HOLD", 2)
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    sender.ask("abort", request.lease_id)
    receiver.go_on()
    arena.finish(request, of="sender")
    receiver.ask("arm", [])
    arena.finish(request, deadline_s=0.6)
    assert request.received in ("expired", "failed") or arena.transports == ("tcp",)
    arena.check(sender, receiver)


@OVER_ALL
def test_many_requests_share_one_link(arena: Arena) -> None:
    """One request is aborted, one expires and one is refused. The others complete."""
    sender, receiver = arena.sender(), arena.receiver()
    requests = [arena.begin(sender, receiver, 12, chunk=2) for _ in range(7)]
    sender.ask("abort", requests[1].lease_id)
    receiver.ask("expire", requests[1].lease_id)
    late = arena.reserve(sender, receiver, 4)
    receiver.ask("expire", late.lease_id)
    arena.push(late)
    assert arena.begin(sender, receiver, ROOM).received == "failed"
    arena.finish(*requests, late)
    good = [request for request in requests if request is not requests[1]]
    assert {(request.sent, request.received) for request in good} == {("completed", "completed")}
    arena.check(sender, receiver)
