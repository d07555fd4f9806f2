"""Either side is killed or frozen at each point, and wakes up late.

A dead peer must be noticed by its connection: the time-outs are longer than the tests of kills wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.transfer.certificates import Authority
from tests.faults.arena import ORPHAN_S, Arena, cases, needs_nixl
from tests.faults.points import CONNECTING, RECEIVER_POINTS, SENDER_POINTS, Point, points_over
from tests.faults.processes import LARGE, Child, Stock
from tests.faults.sides import HASTY

SENDER_FROZEN = ["hello sent", "verdict received", "piece begins", "mid payload", "ack arrives", "ack read"]
RECEIVER_FROZEN = ["accepted", "reader ready", "piece admitted", "mid copy", "mid receive", "ack due", "told"]
PROMPT_S = 5.0
"""Two time-outs of half a second, more for ucx, and an allowance for a busy machine."""


def only(points: dict[str, Point], names: list[str]) -> dict[str, Point]:
    return {name: points[name] for name in names}


NOT_LARGE_ENOUGH = {"mid payload"}
"""A small piece is written in one call."""


@pytest.fixture
def pair(stock: Stock, wire: str, checksum: str, tmp_path: Path) -> Iterator[tuple[Arena, Child, Child]]:
    """Start a sender, which hardly waits to abort, and a receiver, which may be late, over a wire."""
    arena = Arena(stock, ("tcp" if wire == "tls" else wire,))
    certificates = Authority(tmp_path / "authority").issue("worker") if wire == "tls" else None
    sender = arena.sender(checksum=checksum, abort_timeout_s=0.1, certificates=certificates)
    yield arena, sender, arena.receiver(certificates=certificates)
    arena.close()


def points_of(points: dict[str, Point], wire: str) -> list[str]:
    return [
        name for name in points_over(points, "tcp" if wire == "tls" else wire) if name not in NOT_LARGE_ENOUGH
    ]


on_every_wire = pytest.mark.parametrize(
    "wire", ["shm", "tcp", "tls", "object_store", pytest.param("ucx", marks=needs_nixl)]
)
with_and_without_checksums = pytest.mark.parametrize("checksum", ["off", "full"])


@on_every_wire
@with_and_without_checksums
def test_blocks_reused_while_the_receiver_is_frozen_never_arrive(
    pair: tuple[Arena, Child, Child], wire: str
) -> None:
    """At every point, the sender aborts and then writes to blocks that the receiver may still read."""
    arena, sender, receiver = pair
    arena.serve(sender, receiver, 4, chunk=2)
    for point in points_of(RECEIVER_POINTS, wire):
        request = arena.reserve(sender, receiver, 4)
        receiver.arm(point, "STOP")
        if point in CONNECTING:
            sender.ask("cut")  # it reconnects at once
        arena.push(request, chunk=2)
        if point in ("closing", "closed"):
            receiver.tell("expire", request.lease_id)
            receiver.owes_answer = True
        receiver.wait_at(point)
        receiver.await_frozen()
        sender.ask("abort", request.lease_id)
        receiver.thaw()
        arena.serve(sender, receiver, 2)
        receiver.ask("await_connections", 1)  # the earlier connection has recorded its reads, or never will
        arena.finish(request, deadline_s=0)
    arena.check(sender, receiver)


@on_every_wire
@with_and_without_checksums
def test_blocks_reused_while_the_sender_is_frozen_are_never_written(
    pair: tuple[Arena, Child, Child], wire: str
) -> None:
    """At every point of a piece, the receiver closes the lease and discards what the sender still sends."""
    arena, sender, receiver = pair
    arena.serve(sender, receiver, 4, chunk=2)
    for point in points_of(SENDER_POINTS, wire):
        if point in CONNECTING:
            continue
        sender.arm(point, "STOP")
        request = arena.reserve(sender, receiver, 4)
        arena.push_and_freeze(request, point)
        receiver.ask("expire", request.lease_id)
        sender.thaw()
        arena.finish(request)
        arena.serve(sender, receiver, 2)
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("point", "transport"), cases(only(SENDER_POINTS, SENDER_FROZEN), ucx=["piece begins", "piece sent"])
)
def test_the_sender_freezes_and_wakes_up_late(arena: Arena, point: str) -> None:
    """The sender's late bytes belong to a closed lease, or complete an open one."""
    sender, receiver = arena.sender(), arena.receiver()
    sender.arm(point, "STOP")
    request = arena.reserve(sender, receiver)
    arena.push_and_freeze(request, point)
    arena.finish(request, deadline_s=ORPHAN_S)
    assert request.received in ("failed", "expired", "completed")
    sender.thaw()
    arena.finish(request, of="sender")
    arena.check(sender, receiver)


@pytest.mark.parametrize(
    ("point", "transport"),
    [
        *cases(only(RECEIVER_POINTS, RECEIVER_FROZEN), ucx=["reader ready", "mid read"]),
        ("converting", "shm"),
        ("converted", "tcp"),
    ],
)
def test_the_receiver_freezes_and_wakes_up_late(arena: Arena, point: str) -> None:
    """By then the sender has reused its blocks, and the receiver must not believe their bytes."""
    sender, receiver = arena.sender(**HASTY), arena.receiver()
    receiver.arm(point, "STOP")
    request = arena.begin(sender, receiver)
    receiver.wait_at(point)
    receiver.await_frozen()
    arena.finish(request, deadline_s=PROMPT_S)
    assert request.sent == "failed" and "no progress" in request.reasons
    receiver.thaw()
    arena.finish(request, deadline_s=ORPHAN_S)
    arena.check(sender, receiver)


def test_a_full_socket_to_a_frozen_receiver_blocks_nobody_else(arena: Arena) -> None:
    """The unsent bytes exceed the sockets' buffers, and the sender serves another receiver meanwhile."""
    sender = arena.sender(size=LARGE, **HASTY)
    frozen, other = arena.receiver("decode-0", size=LARGE), arena.receiver("decode-1", size=LARGE)
    frozen.arm("mid receive", "STOP")
    stuck = arena.begin(sender, frozen, 48, chunk=24)
    frozen.wait_at("mid receive")
    frozen.await_frozen()
    arena.serve(sender, other, 24)
    arena.finish(stuck, deadline_s=PROMPT_S)
    assert stuck.sent == "failed"
    frozen.thaw()
    arena.finish(stuck, deadline_s=ORPHAN_S)
    arena.check(sender, frozen, other)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_short_freeze_only_delays(arena: Arena) -> None:
    sender, receiver = arena.sender(), arena.receiver()
    for child, point in ((sender, "piece begins"), (receiver, "piece admitted")):
        child.arm(point, "STOP", 2)
        request = arena.reserve(sender, receiver)
        arena.push(request, wait=False)
        child.wait_at(point)
        child.await_frozen()
        child.thaw()
        arena.pushed(request)
        arena.finish(request)
        assert (request.sent, request.received) == ("completed", "completed")
    assert sender.ask("counters")["connections_made"] == 1
    arena.check(sender, receiver)


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
