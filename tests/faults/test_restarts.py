"""Full pools, expiring leases, aborted requests, and processes that die and come again, at every moment."""

from __future__ import annotations

import msgspec
import pytest

from tests.faults.arena import ORPHAN_S, Arena, needs_nixl
from tests.faults.processes import SMALL, Child
from tests.faults.proxy import Damage

OVER_ALL = pytest.mark.parametrize("transport", ["tcp", "shm", pytest.param("ucx", marks=needs_nixl)])
ROOM = SMALL[0]


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


EXPIRES_AT = {
    "tcp": ["piece announced", "mid receive", "ack due", "converting"],
    "shm": ["piece admitted", "mid copy", "in place", "converted"],
    "ucx": ["mid read"],
}
ABORTED_AT = {
    "tcp": ["piece announced", "mid receive"],
    "shm": ["mid copy", "ack due"],
    "ucx": ["mid read", "in place"],
}


def at(points: dict[str, list[str]]) -> pytest.MarkDecorator:
    """Name points by transport as a test's parameters."""
    cases = [
        pytest.param(name, transport, marks=needs_nixl if transport == "ucx" else ())
        for transport, names in points.items()
        for name in names
    ]
    return pytest.mark.parametrize(("point", "transport"), cases)


@at(EXPIRES_AT)
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


@at(ABORTED_AT)
def test_a_request_is_aborted_at(arena: Arena, point: str) -> None:
    """The sender reuses its blocks at once. Over `tcp` all bytes may have been sent before."""
    sender, receiver = arena.sender(), arena.receiver()
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


def first(arena: Arena) -> Child:
    """Start a receiver whose address a successor can reuse."""
    return arena.receiver(listen_at=dict.fromkeys(("tcp", "ucx"), "127.0.0.1:0"))


def successor_of(arena: Arena, receiver: Child) -> Child:
    addresses = {offer.transport: offer.address for offer in receiver.peer.offers}
    return arena.receiver(receiver.worker_id, listen_at=addresses)


@OVER_ALL
def test_a_receiver_restarts_between_two_requests(arena: Arena) -> None:
    sender, old = arena.sender(), first(arena)
    arena.serve(sender, old)
    stale = old.peer
    old.kill()
    new = successor_of(arena, old)
    assert new.peer.offers == stale.offers and new.peer.incarnation != stale.incarnation
    request = arena.reserve(sender, new)
    arena.push(request, peer=stale)
    arena.finish(request, of="sender")
    assert request.sent == "failed" and "stale" in request.reasons
    arena.finish(request, deadline_s=0.0)
    arena.serve(sender, new)
    arena.check(sender, new)


@pytest.mark.parametrize(
    ("point", "transport"),
    [("piece admitted", "tcp"), ("ack sent", "shm"), pytest.param("piece admitted", "ucx", marks=needs_nixl)],
)
def test_a_receiver_restarts_in_the_middle_of_a_request(arena: Arena, point: str) -> None:
    """The sender reconnects at once and recognizes another incarnation."""
    sender, old = arena.sender(), first(arena)
    old.arm(point, "HOLD", 2)
    request = arena.begin(sender, old)
    old.wait_at(point)
    old.kill()
    new = successor_of(arena, old)
    again = arena.reserve(sender, new, lease_id=f"{request.lease_id}-again")
    arena.finish(request)
    assert request.sent == "failed"
    arena.push(again)
    arena.finish(again)
    assert (again.sent, again.received) == ("completed", "completed")
    arena.check(sender, new)


@OVER_ALL
def test_a_receiver_under_its_own_name_reopens_a_lease_of_its_predecessor(arena: Arena) -> None:
    """Pieces for the dead receiver's lease do not land in the new one's lease of the same name."""
    sender, old = arena.sender(), first(arena)
    before = arena.begin(sender, old, until=12)
    sender.ask("await_sent", before.lease_id, 12)
    old.kill()
    new = successor_of(arena, old)
    after = arena.reserve(sender, new, lease_id=before.lease_id)
    stale = msgspec.structs.replace(new.peer, incarnation=old.peer.incarnation)
    arena.push(before, peer=stale, first=12)
    arena.finish(before)
    assert before.sent == "failed"
    arena.finish(after, of="receiver", deadline_s=0.0)
    assert new.ask("counters").get("connections_accepted", 0) == 0
    arena.check(sender, new)


@OVER_ALL
def test_a_sender_restarts_and_pushes_to_the_same_lease(arena: Arena) -> None:
    old, receiver = arena.sender(), arena.receiver()
    held = arena.begin(old, receiver, until=12)
    old.ask("await_sent", held.lease_id, 12)
    new = arena.sender(old.worker_id)
    intruding = arena.again(held, new)
    arena.push(intruding)
    arena.finish(intruding, of="sender")
    assert intruding.sent == "failed" and "another sender" in intruding.reasons
    arena.push(held, first=12)
    arena.finish(held)
    assert (held.sent, held.received) == ("completed", "completed")
    arena.check(old, new, receiver)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_frozen_senders_successor_takes_over(arena: Arena) -> None:
    """The old sender wakes up and continues with a closed lease, beside the new sender's."""
    old, receiver = arena.sender(), arena.receiver()
    old.arm("piece begins", "STOP", 2)
    request = arena.reserve(old, receiver)
    arena.push_and_freeze(request, "piece begins")
    receiver.ask("expire", request.lease_id)
    new = arena.sender(old.worker_id)
    arena.serve(new, receiver, 72)
    old.thaw()
    arena.finish(request)
    assert request.sent == "failed"
    arena.check(old, new, receiver)


def test_a_link_that_broke_comes_back_to_another_incarnation(arena: Arena) -> None:
    """The proxy simulates an address that a load balancer or a moved pod leads to another process."""
    sender, receiver = arena.sender(), arena.receiver()
    proxy, peer = arena.proxy(receiver, Damage("drop", 200_000))
    other = arena.receiver("decode-1")
    request = arena.reserve(sender, receiver)
    proxy.redirect(other.peer.offers[0].address)
    arena.push(request, peer=peer)
    arena.finish(request, deadline_s=ORPHAN_S)
    assert request.sent == "failed" and "stale" in request.reasons
    arena.drop(proxy)
    arena.check(sender, receiver, other)
