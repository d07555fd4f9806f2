"""The rolling restart: its order, successors, and workers that do not come back."""

from __future__ import annotations

import pytest

from router.scaling.interface import ScaleAnswer
from tests.router.router_clients import eventually, post


@pytest.fixture
def start(make_router, monkeypatch):
    """Start a router with workers of these ids."""
    monkeypatch.setattr("router.scaling.scaler.GRACE_S", 0.0)

    def start(*worker_ids, **options):
        router = make_router(**options)
        for worker_id in worker_ids:
            router.add_worker(worker_id, worker_id.partition("-")[0])
        eventually(lambda: len(router.server.state.registry.live()) == len(worker_ids))
        return router

    return start


def come_back(router, worker_id):
    """Start a new process of that name once the old one is released, as the launcher does."""
    old = next(worker for worker in router.workers if worker.worker_id == worker_id)
    assert old.has_left.wait(20)
    router.kill(old)
    router.add_worker(worker_id, old.role)


def test_the_only_worker_of_a_role_gets_a_successor_before_it_leaves(start, pool, caplog):
    router = start("decode-0")
    asked = []

    def scale(request):
        asked.append(request.targets)
        pool.submit(router.add_worker, "decode-1")
        return ScaleAnswer(started=["decode-1"])

    router.server.on_scale(scale)
    with caplog.at_level("INFO"):
        answer = router.http.post("/restart", json={}).json()
    logged = "restarted: decode-0; successors: decode-1; requests moved: 0, redirected: 0, placed again: 0"
    assert logged in caplog.text
    assert (answer["restarted"], answer["successors"], asked) == (["decode-0"], ["decode-1"], [{"decode": 2}])
    assert [worker.key.worker_id for worker in router.server.state.registry.live()] == ["decode-1"]
    assert post(router, max_tokens=3).status_code == 200


def test_without_room_for_a_successor_nothing_changes(start):
    router = start("decode-0", "prefill-0", "prefill-1")
    router.server.on_scale(lambda request: ScaleAnswer(refusal="the nodes take at most 1", field="decode"))
    answer = router.http.post("/restart", json={})
    assert (answer.status_code, "the nodes take at most 1" in answer.text) == (409, True)
    assert len(router.server.state.registry.live()) == 3


def test_a_worker_that_does_not_come_back_ends_the_restart(start, pool):
    router = start("decode-0", "decode-1", "decode-2", start_timeout=3.0)
    restart = pool.submit(router.http.post, "/restart", json={})
    come_back(router, "decode-0")
    again = router.http.post("/restart", json={})
    assert (again.status_code, "a restart is under way already" in again.text) == (409, True)
    answer = restart.result(20)
    assert answer.status_code == 503
    reason = "worker decode-1 did not come back: it was not ready within 3 s; restarted before it: decode-0"
    assert reason in answer.text
    live = {worker.key.worker_id for worker in router.server.state.registry.live()}
    assert live == {"decode-0", "decode-2"}, "its turn had not come"


@pytest.mark.parametrize("alone", [False, True], ids=["others", "alone"])
def test_a_worker_that_dies_as_it_is_to_restart_counts_as_restarted(start, pool, alone):
    names = ["decode-0"] if alone else ["decode-0", "decode-1"]
    router = start(*names)
    registry, died = router.server.state.registry, []

    def let_go(worker_id, for_good):
        if not died:
            died.append(worker_id)
            registry.mark_dead(worker_id, registry.current_of(worker_id).key.incarnation, "killed")
            pool.submit(router.add_worker, worker_id)
        return ""

    def scale(request):
        pool.submit(router.add_worker, "decode-1")
        return ScaleAnswer(started=["decode-1"])

    router.server.on_leave(let_go, lambda *_: None)
    router.server.on_scale(scale)
    restart = pool.submit(router.http.post, "/restart", json={})
    if not alone:
        come_back(router, "decode-1")
    answer = restart.result(20)
    assert answer.status_code == 200, answer.text
    assert answer.json()["restarted"] == names


def test_scaling_and_a_restart_take_turns(start, pool):
    """Neither begins during the other, and both can begin afterwards, even if the first one failed."""
    router = start("decode-0", "decode-1", start_timeout=3.0)
    router.server.on_scale(lambda request: ScaleAnswer(started=["decode-2"]))
    scaling = pool.submit(router.http.post, "/scale", json={"decode": 3})
    eventually(lambda: router.server.state.turns.changes.under_way == ["scaling"])
    refused = router.http.post("/restart", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "change_under_way")
    assert "a scaling is under way already, asked of router-0" in refused.text
    router.add_worker("decode-2")
    assert scaling.result(20).status_code == 200
    restart = pool.submit(router.http.post, "/restart", json={})
    eventually(lambda: router.server.state.turns.changes.under_way == ["restart"])
    refused = router.http.post("/scale", json={"decode": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "change_under_way")
    assert "a restart is under way already, asked of router-0" in refused.text
    assert restart.result(20).status_code == 503, "nobody comes back"
    router.server.on_scale(lambda request: ScaleAnswer())
    assert router.http.post("/scale", json={"decode": 2}).status_code == 200


def test_workers_whose_successor_may_be_refused_come_first(start):
    """Whatever their names: workers with neighbours restart only after the successor is granted."""
    router = start("decode-0", "decode-1", "prefill-0", start_timeout=3.0)
    order = []

    def scale(request):
        order.extend(worker.worker_id for worker in router.workers if worker.has_left.is_set())
        return ScaleAnswer(refusal="the nodes take at most 1", field="prefill")

    router.server.on_scale(scale)
    answer = router.http.post("/restart", json={})
    assert (answer.status_code, answer.json()["error"]["param"], order) == (409, "prefill", [])
    assert not any(worker.has_left.is_set() for worker in router.workers)
