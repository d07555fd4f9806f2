"""Faults of whole servers beyond signals: restarted workers, a full pool, a cut network. fp32."""

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
from tests.faults.network import Network, enter
from tests.worker.child import run_child

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
