"""Requests of a leaving worker move to other workers, or stay if none can take them."""

from __future__ import annotations

import pytest

from protocol.codec import encode
from tests.router.fake_worker import echo_script
from tests.router.router_clients import emitted, eventually, is_idle, lose, make_pair, post

pytestmark = pytest.mark.usefixtures("no_races")
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
