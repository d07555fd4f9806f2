"""Requests wait for workers that are being started, and continue with the same tokens."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.router.router_clients import (
    answer,
    ask_and_leave,
    emitted,
    eventually,
    is_idle,
    lose,
    make_pair,
    post,
)

pytestmark = pytest.mark.usefixtures("no_races")
PROMPT = "naïve 🙂 日本語 text 👩‍👩‍👧 and more"
FIELDS = {"prompt": PROMPT, "max_tokens": 40, "return_token_ids": True}


def parked(router) -> int:
    return int(router.metric("tandem_num_requests_parked"))


@pytest.fixture
def router(make_router):
    """Make a router whose launcher keeps two workers running."""
    router = make_router()
    router.server.expect({"prefill-0": "prefill", "decode-0": "decode"})
    return router


@pytest.fixture
def without_workers(make_router):
    """Make a router that expects two workers, of which none is there."""

    def make(**options):
        router = make_router(**options)
        router.server.expect({"decode-0": "decode", "decode-1": "decode"})
        lose(router, router.add_worker("decode-0"))
        eventually(lambda: router.http.get("/ready").status_code == 503)
        return router

    return make


@pytest.fixture
def expected(undisturbed):
    return undisturbed(**FIELDS)


def test_all_workers_die_and_come_back(router, pool, expected):
    """One request runs, one is in prefill, and one arrives while no worker is there."""
    prefill, decode = make_pair(router)
    decode.stall_after = 7
    running = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [7])
    prefill.hold.set()
    queued = pool.submit(post, router, **FIELDS)
    eventually(lambda: len(prefill.generated) == 2)
    lose(router, decode)
    lose(router, prefill)
    eventually(lambda: parked(router) == 2)
    late = pool.submit(post, router, **FIELDS)
    eventually(lambda: parked(router) == 3)
    assert sorted(emitted(router)) == [0, 0, 7]
    assert not (running.done() or queued.done() or late.done())
    decode = router.add_worker("decode-0")
    router.add_worker("prefill-0", "prefill", peers={"decode-0": decode})
    assert [answer(future.result(20)) for future in (running, queued, late)] == [expected] * 3
    assert parked(router) == 0
    assert router.metric("tandem_requests_parked_total") == 3
    assert router.metric("tandem_request_failures_total") == 0
    eventually(lambda: is_idle(router))


def test_ready_reports_the_workers_that_are_there(router, pool):
    worker = router.add_worker("decode-0")
    worker.hold.set()
    future = pool.submit(post, router, max_tokens=3)
    eventually(lambda: worker.generated)
    assert router.http.get("/ready").status_code == 200
    lose(router, worker)
    eventually(lambda: parked(router) == 1)
    shown = router.http.get("/ready")
    assert shown.status_code == 503
    assert shown.json()["reason"] == "no worker is ready; 1 requests wait for prefill-0, decode-0 to start"
    assert router.http.get("/health").status_code == 200
    assert (router.metric("tandem_ready"), router.metric("tandem_num_workers_awaited")) == (0, 2)
    router.add_worker("decode-0")
    assert future.result(20).status_code == 200
    shown = router.http.get("/ready")
    assert (shown.status_code, shown.json()) == (200, {"status": "ready", "awaited": ["prefill-0"]})
    assert (router.metric("tandem_ready"), router.metric("tandem_num_workers_awaited")) == (1, 1)


def test_a_worker_that_cannot_decode_does_not_make_the_server_ready(make_router):
    router = make_router()
    router.add_worker("prefill-0", "prefill")
    assert router.http.get("/ready").status_code == 200, "it serves whole requests"
    worker = router.server.state.registry.named("prefill-0")
    worker.role = msgspec.structs.replace(worker.role, tasks=("prefill",))
    shown = router.http.get("/ready")
    assert (shown.status_code, shown.json()["reason"]) == (503, "no worker is ready")


def test_the_deadline_holds_for_parked_requests(without_workers):
    router = without_workers(request_timeout=0.6)
    asked = time.monotonic()
    assert post(router, max_tokens=3).status_code == 504
    assert 0.5 < time.monotonic() - asked < 20
    assert (parked(router), len(router.server.state.journal)) == (0, 0)


def test_the_timeout_is_not_restarted_by_a_new_placement(make_router, pool):
    router = make_router(request_timeout=30.0)
    router.server.expect({"decode-0": "decode"})
    first = router.add_worker("decode-0")
    first.stall_after = 3
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [3])
    time.sleep(0.3)  # a second placement must not restart the timeout
    lose(router, first)
    second = router.add_worker("decode-0")
    assert future.result(20).status_code == 200
    assert first.generated[0].timeout_s <= 30.0
    assert second.generated[0].timeout_s <= first.generated[0].timeout_s - 0.3


def test_parked_requests_fail_when_the_launcher_gives_up(router, pool):
    worker = router.add_worker("decode-0")
    worker.stall_after = 3
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [3])
    lose(router, worker)
    eventually(lambda: parked(router) == 1)
    router.server.expect({})
    response = future.result(20)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    later = post(router, max_tokens=3)
    assert (later.status_code, later.headers["retry-after"]) == (503, "1")
    assert (parked(router), len(router.server.state.journal)) == (0, 0)


def test_a_parked_requests_client_may_leave(without_workers):
    router = without_workers()
    ask_and_leave(router, lambda: parked(router) == 1, max_tokens=3)
    eventually(lambda: parked(router) == 0 and not len(router.server.state.journal))


def test_a_silent_worker_that_answers_again_gets_parked_requests(make_router, pool, expected):
    router = make_router(worker_timeout=0.5)
    router.server.expect({"decode-0": "decode"})
    worker = router.add_worker("decode-0")
    worker.stall_after = 7
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [7])
    worker.mute.set()
    eventually(lambda: parked(router) == 1)
    worker.stall_after = 2**31
    worker.mute.clear()
    assert answer(future.result(20)) == expected


def test_the_first_worker_to_come_back_does_not_get_everything(without_workers, pool):
    """Requests beyond its batch wait for the other workers while any are expected."""
    router = without_workers(max_num_seqs=2)
    futures = [pool.submit(post, router, max_tokens=3) for _ in range(6)]
    eventually(lambda: parked(router) == 6)
    first = router.add_worker("decode-0", step_s=0.3)
    first.hold.set()  # long before it has finished one
    eventually(lambda: parked(router) == 4 and len(first.generated) == 2)
    second = router.add_worker("decode-1")
    eventually(lambda: parked(router) == 0)
    first.hold.clear()
    assert [future.result(20).status_code for future in futures] == [200] * 6
    assert (len(first.generated), len(second.generated)) == (3, 3)


def test_parked_requests_keep_their_order(without_workers, pool, monkeypatch):
    """Free room at the only worker is used at once: the next periodic sweep is not awaited."""
    monkeypatch.setattr("router.state.SWEEP_INTERVAL_S", 60.0)
    router, futures = without_workers(max_num_seqs=1), []
    for count in (1, 2, 3, 4):
        futures.append(pool.submit(post, router, max_tokens=count))
        eventually(lambda count=count: parked(router) == count)
    worker = router.add_worker("decode-0")
    assert [future.result(20).status_code for future in futures] == [200] * 4
    assert [request.sampling.max_tokens for request in worker.generated] == [1, 2, 3, 4]


def test_a_disconnected_worker_is_expected_back_before_the_launcher_says_so(router, pool):
    router.kill(router.add_worker("decode-0"))
    future = pool.submit(post, router, max_tokens=3)
    eventually(lambda: not router.server.state.registry.live() and parked(router) == 1)
    again = router.add_worker("decode-0")
    assert future.result(20).status_code == 200
    assert len(again.generated) == 1
