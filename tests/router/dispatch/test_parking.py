"""Requests without a worker: those of a leaving one move, and parked ones wait for a new one."""

from __future__ import annotations

import time

import msgspec
import pytest

from protocol.codec import encode
from tests.router.fake_worker import echo_script
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


NUM_TOKENS = 40


class Scene:
    """`leaving` is paused with a request that `target` is to prefetch but has not answered for yet."""

    def __init__(self, router, pool) -> None:
        self.router = router
        self.leaving = router.add_worker("decode-0", stall_after=5)
        self.answer = pool.submit(post, router, max_tokens=NUM_TOKENS, return_token_ids=True)
        eventually(lambda: emitted(router) == [5])
        self.target = router.add_worker("decode-1")
        self.target.prefetches = None
        self.drained = pool.submit(router.http.post, "/workers/decode-0/drain", json={})
        eventually(lambda: self.target.prefetched)

    def sweep(self) -> None:
        """Let the router check its drains a few more times."""
        drainer = self.router.server.state.drainer
        usual, looks = drainer.sweep, []
        drainer.sweep = lambda: looks.append(usual())
        eventually(lambda: len(looks) >= 3)
        drainer.sweep = usual

    def check(self, moved: int) -> None:
        self.leaving.stall_after = NUM_TOKENS
        tokens = self.answer.result(20).json()["choices"][0]["token_ids"]
        assert tokens == echo_script(self.leaving.generated[0])[:NUM_TOKENS]
        assert self.drained.result(20).json()["moved"] == moved
        eventually(lambda: is_idle(self.router))


@pytest.fixture
def scene(make_router, pool) -> Scene:
    return Scene(make_router(), pool)


def test_a_failed_prefetch_is_not_repeated(scene):
    """The request ends where it is."""
    scene.target.post(encode(scene.target.prefetch_answer(complete=False)))
    scene.sweep()
    assert len(scene.target.prefetched) == 1
    scene.check(moved=0)
    assert not scene.target.generated


def test_nothing_moves_to_a_worker_that_is_leaving(scene):
    scene.router.add_worker("decode-2")
    assert scene.router.http.post("/workers/decode-1/drain", json={}).status_code == 200
    scene.target.post(encode(scene.target.prefetch_answer(complete=True)))
    scene.sweep()
    scene.check(moved=0)
    assert not scene.target.generated


def test_a_moved_request_has_no_answer_from_its_new_worker_yet(scene):
    scene.target.hold.set()
    scene.target.post(encode(scene.target.prefetch_answer(complete=True)))
    eventually(lambda: scene.target.generated)
    (request,) = scene.router.server.state.journal
    assert (request.num_emitted_before, request.assignment.answered_by) == (5, None)
    scene.target.hold.clear()
    scene.check(moved=1)


def test_another_worker_prefetches_after_the_target_dies(scene):
    other = scene.router.add_worker("decode-2")
    lose(scene.router, scene.target)
    eventually(lambda: other.generated)
    scene.check(moved=1)
    assert other.prefetched == scene.target.prefetched


def test_requests_queued_in_the_router_go_elsewhere_at_once(make_router, pool):
    """This does not wait for --drain-timeout."""
    router = make_router(max_num_seqs=2)
    prefill, decode = make_pair(router)
    prefill.hold.set()
    asked = [pool.submit(post, router, max_tokens=3) for _ in range(7)]
    eventually(lambda: router.metric("tandem_num_requests_held", api_key="0") == 3)
    other = router.add_worker("prefill-1", "prefill", peers={"decode-0": decode})
    drained = pool.submit(router.http.post, "/workers/prefill-0/drain", json={})
    eventually(lambda: router.metric("tandem_requests_placed_again_total", reason="drain") == 3)
    prefill.hold.clear()
    assert [each.result(20).status_code for each in (*asked, drained)] == [200] * 8
    assert (len(prefill.generated), len(other.generated)) == (4, 3)


def test_the_launcher_is_asked_for_a_role_change_and_told_of_it(make_router):
    router, told = make_router(), []
    router.server.on_leave(lambda *asked: told.append(asked) or "", lambda *renewed: told.append(renewed))
    for index in range(2):
        router.add_worker(f"decode-{index}")
    assert router.http.post("/workers/decode-1/role", json={"role": "prefill"}).status_code == 200
    assert told[0] == ("decode-1", False)
    assert told[1][:2] == ("decode-1", "prefill") and len(told) == 2
    assert router.http.post("/workers/decode-0/drain", json={}).status_code == 409
