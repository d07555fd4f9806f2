"""A worker of several routers when one of them disappears."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from protocol.ids import new_request_id, router_of
from tests.worker.harness import ROUTER, Cluster, request, tiny_config
from tests.worker.tiny_model import VOCAB_SIZE
from worker.link import RouterLeases, RouterLinks

OURS, THEIRS = f"{ROUTER}.ours", "second.theirs"
NUM_TOKENS = 60


def test_requests_of_a_lost_router_end_and_others_continue(model_folder: Path) -> None:
    config = tiny_config(model_folder, worker_timeout=0.3)
    prompt = random.Random(1).choices(range(1, VOCAB_SIZE), k=40)
    with Cluster() as first, Cluster(first.keys, "second") as second:
        first.endpoints.append(second.endpoint)
        worker = first.start("decode", "decode-0", config, "slow:0.02")
        second.wait(lambda: "decode-0" in second.registered)
        first.generate(worker, request(OURS, prompt, NUM_TOKENS))
        second.generate(worker, request(THEIRS, prompt, 200))
        second.wait(lambda: len(second.outputs[THEIRS]) > 3)
        assert not second.outputs[OURS]
        second.close()
        first.run(OURS)
        assert len(first.tokens(OURS)) == NUM_TOKENS
        assert not first.outputs[THEIRS]
        first.wait_empty(worker)
        assert worker.counter("orphaned_requests_total") == 1
        assert worker.state.num_running == 0


class Lines:
    """The connections of two routers, as `RouterLeases` sees them."""

    def __init__(self) -> None:
        self.first = SimpleNamespace(is_connected=True, router="first")
        self.second = SimpleNamespace(is_connected=True, router="second")
        self.leases = RouterLeases(cast(RouterLinks, [self.first, self.second]), ttl_s=2.0)

    def expired(self, now: float, *request_ids: Any) -> list[str]:
        return self.leases.expired(request_ids, now)


def test_a_router_that_is_away_briefly_loses_nothing() -> None:
    lines = Lines()
    assert lines.expired(0.0, "first.a", "second.b") == []
    lines.second.is_connected = False
    assert lines.expired(1.9, "first.a", "second.b") == []
    lines.second.is_connected = True
    assert lines.expired(2.5, "first.a", "second.b") == []
    lines.second.is_connected = False
    assert lines.expired(4.4, "first.a", "second.b") == []
    assert lines.expired(4.6, "first.a", "second.b") == ["second.b"]


def test_a_restarted_router_inherits_nothing() -> None:
    lines = Lines()
    lines.expired(0.0, "second.old")
    lines.second.router = "third"
    assert lines.expired(1.0, "second.old", "third.new") == []
    assert lines.expired(2.1, "second.old", "third.new") == ["second.old"]


def test_late_requests_of_a_lost_router_end_too() -> None:
    lines = Lines()
    assert lines.expired(100.0, "unheard.late") == []
    assert lines.expired(102.1, "unheard.late") == ["unheard.late"]


def test_without_any_router_nothing_ends() -> None:
    lines = Lines()
    lines.expired(0.0, "first.a", "second.b")
    lines.first.is_connected = lines.second.is_connected = False
    assert lines.expired(50.0, "first.a", "second.b") == []
    lines.second.is_connected = True
    assert lines.expired(51.0, "first.a", "second.b") == ["first.a"]


def test_an_id_names_its_router() -> None:
    assert router_of(new_request_id("abc")) == "abc"
