"""Networks that are cut between two ends or two whole workers, and workers that restart. fp32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tests.e2e.serving
import tests.worker.harness
from router.server import RouterServer
from tests.e2e.conftest import folder, reference
from tests.e2e.serving import HttpServing
from tests.e2e.test_failover import (
    BOUND_S,
    REQUESTS,
    SLOW,
    ask,
    ask_all,
    changes,
    check_afterwards,
    expected,
    pool,
)
from tests.faults.arena import ORPHAN_S, Arena
from tests.faults.network import Network, enter
from tests.faults.processes import Child
from tests.worker.child import run_child

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


__all__ = ["expected", "folder", "pool", "reference"]


def run_in_network(networks: dict[str, str], role: Any, config: Any, worker_id: str, *rest: Any) -> None:
    enter(networks[worker_id])
    run_child(role, config, worker_id, *rest)


@pytest.fixture
def joined(networks_work: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Put prefill workers on one host and decode workers on another; the router reaches both."""
    network = Network(joined=True)
    where = {"prefill-0": network.left, "decode-0": network.right}
    monkeypatch.setattr(tests.worker.harness, "run_child", functools.partial(run_in_network, where))
    router = functools.partial(RouterServer, link_host=network.hosts[""])
    monkeypatch.setattr(tests.e2e.serving, "RouterServer", router)
    yield network
    network.close()


@pytest.mark.parametrize("cut", ["both ways", "to the prefill worker"])
def test_the_network_between_two_workers_is_cut(
    folder: Path, pool: ThreadPoolExecutor, expected: list[dict[str, Any]], joined: Network, cut: str
) -> None:
    """Both workers live and the router sees them, so a prefill worker decodes its requests itself."""
    back, there = (joined.right, joined.left), (joined.left, joined.right)
    ways = [back] if cut == "to the prefill worker" else [there, back]
    workers = {"prefill-0": SLOW, "decode-0": ""}
    with HttpServing(folder, workers, handoff_timeout=1.5, kv_transports="shm,tcp") as serving:
        assert ask(serving, REQUESTS[1]) == expected[1]
        answers = ask_all(serving, pool)
        for way in ways:
            joined.cut(*way)
        assert [answer.result(BOUND_S) for answer in answers] == expected
        assert changes(serving) + serving.counter("prefill-0", "handoffs_kept_total") > 0
        for way in ways:
            joined.mend(*way)
        check_afterwards(serving, expected)


@pytest.mark.parametrize("restarted", ["prefill-0", "decode-0"])
def test_a_worker_restarts_under_its_own_name(
    folder: Path, pool: ThreadPoolExecutor, expected: list[dict[str, Any]], restarted: str
) -> None:
    """Messages of the other worker for the dead incarnation are stale, and nothing of it is left."""
    fault = {"prefill-0": "KILL:after:_push:3", "decode-0": "KILL:after:on_transfer:2"}[restarted]
    workers = {"prefill-0": SLOW, "decode-0": ""}
    workers[restarted] = "+".join(filter(None, [fault, workers[restarted]]))
    with HttpServing(folder, workers, handoff_timeout=3.0) as serving:
        answers = ask_all(serving, pool)
        serving.bury(restarted)
        serving.workers[restarted] = serving._start(restarted, "")
        assert [answer.result(BOUND_S) for answer in answers] == expected
        serving.wait(lambda: restarted in serving.worker_states())
        check_afterwards(serving, expected)
