"""The link between two hosts, each a network namespace, is cut: no packet and no error comes back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.arena import ORPHAN_S, Arena
from tests.faults.network import Network
from tests.faults.processes import Child

PROMPT_S = 6.0
PATIENCE: dict[str, Any] = {"progress_timeout_s": 1.5, "connect_timeout_s": 1.5}
"""After a second the kernel looks for a silent neighbour again, and repeats a lost SYN."""


@pytest.fixture
def ends(arena: Arena, network: Network) -> tuple[Child, Child]:
    """Start a sender on the left and a receiver on the right, in processes that end with the test."""
    left, right = network.left, network.right
    sender = arena.sender(network=left, host=network.hosts[left], **PATIENCE)
    return sender, arena.receiver(network=right, host=network.hosts[right], **PATIENCE)


CUTS = [
    ("hello sent", "both ways"),
    ("piece begins", "there"),
    ("mid payload", "both ways"),
    ("ack arrives", "back"),
    ("ack arrives", "there"),
    ("piece begins", "unplugged"),
    ("", "both ways"),
]
"""The sender is at this point (or "", between two requests) when this way is cut."""


@pytest.mark.parametrize(("point", "way"), CUTS)
def test_the_link_is_cut(
    arena: Arena, network: Network, ends: tuple[Child, Child], point: str, way: str
) -> None:
    """Each side ends its requests by itself. When the link is mended, the next one is served."""
    sender, receiver = ends
    if point:
        sender.arm(point, "HOLD", 2 if point != "hello sent" else 1)
        request = arena.begin(sender, receiver, 96)
        sender.wait_at(point)
        cut(network, way)
        sender.go_on()
    else:
        arena.serve(sender, receiver)
        cut(network, way)
        request = arena.begin(sender, receiver)
    arena.finish(request, of="sender", deadline_s=PROMPT_S)
    assert request.sent == "failed" and (way == "unplugged" or "no progress" in request.reasons)
    arena.finish(request, deadline_s=ORPHAN_S)
    mend(network, way)
    arena.check(sender, receiver)


def test_the_link_comes_back_in_time(arena: Arena, network: Network) -> None:
    """TCP sends the packets again, so the request only takes longer."""
    sender = arena.sender(network=network.left, host=network.hosts[network.left])
    receiver = arena.receiver(network=network.right, host=network.hosts[network.right])
    sender.arm("piece begins", "HOLD", 2)
    request = arena.begin(sender, receiver)
    sender.wait_at("piece begins")
    cut(network, "both ways")
    sender.go_on()
    mend(network, "both ways")
    arena.finish(request)
    assert (request.sent, request.received) == ("completed", "completed")
    assert sender.ask("counters")["connections_made"] == 1
    arena.check(sender, receiver)


def cut(network: Network, way: str) -> None:
    if way == "unplugged":
        network.unplug(network.right)
        return
    if way != "back":
        network.cut(network.left, network.right)
    if way != "there":
        network.cut(network.right, network.left)


def mend(network: Network, way: str) -> None:
    if way == "unplugged":
        network.plug_in(network.right)
        return
    if way != "back":
        network.mend(network.left, network.right)
    if way != "there":
        network.mend(network.right, network.left)
