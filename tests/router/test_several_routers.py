"""Two routers serve the same workers, each with its own requests, without harming the other's."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deploy.slots import let_go, make_slots
from protocol.config import ServeConfig
from protocol.ids import router_of
from protocol.worker_to_router import WorkerState
from router.workers.registry import Registry
from tests.router.fake_worker import echo_script
from tests.router.placed import registration
from tests.router.router_clients import BODY, emitted, eventually, is_idle, post
from tests.router.several import TwoRouters


def get(url: str) -> httpx.Response:
    """Ask by a connection of its own. Reading the certificate authorities would take longest."""
    return httpx.get(url, verify=False, timeout=60)


def wait_until_both_answer(two: TwoRouters) -> None:
    """Wait until both routers take connections of the shared port, which a router joins once it is ready."""

    def answering() -> set[str]:
        try:
            return {get(f"{two.url}/workers").json()["router"]["id"] for _ in range(20)}
        except httpx.ConnectError:
            return set()

    eventually(lambda: answering() == {"router-0", "router-1"})


@pytest.fixture
def two(model_folder):
    with TwoRouters(model_folder, worker_timeout=10) as two:
        yield two


def token_ids(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def test_each_router_gets_the_tokens_of_its_own_requests(two, pool):
    decode = two.add_worker("decode-0")
    prefill = two.add_worker("prefill-0", peers={"decode-0": decode})
    answers = [
        pool.submit(post, two.routers[number % 2], max_tokens=20 + number, return_token_ids=True)
        for number in range(8)
    ]
    tokens = [token_ids(answer.result(20)) for answer in answers]
    whole = echo_script(max(prefill.generated, key=lambda request: request.sampling.max_tokens))
    assert tokens == [whole[: 20 + number] for number in range(8)]
    owners = Counter(router_of(request.request_id) for request in prefill.generated)
    assert owners == {router.server.state.incarnation: 4 for router in two.routers}
    two.each(is_idle)


def test_routers_share_a_port_and_each_has_its_own(two):
    two.add_worker("decode-0")
    own = [get(f"{router.url}/workers").json()["router"] for router in two.routers]
    assert [router["id"] for router in own] == ["router-0", "router-1"]
    wait_until_both_answer(two)
    assert httpx.post(f"{two.url}/v1/completions", json=BODY, verify=False, timeout=60).status_code == 200


def test_a_router_without_workers_takes_no_shared_connections(two):
    two.add_worker("decode-0")
    wait_until_both_answer(two)
    two.workers[0].mute.set()  # so that a new router hears heartbeats first
    two.restart(0)
    for _ in range(30):
        assert get(f"{two.url}/ready").status_code == 200
    assert get(f"{two.routers[0].url}/ready").status_code == 503
    two.workers[0].mute.clear()
    two.each(lambda router: len(router.server.state.registry.live()) == 1)
    assert post(two.routers[0]).status_code == 200


def test_load_from_other_routers_counts(two, pool):
    """Workers' reports tell each router what the other one has sent."""
    busy = two.add_worker("decode-0", heartbeat_s=0.02)
    busy.hold.set()
    answers = [pool.submit(post, two.routers[0]) for _ in range(4)]
    eventually(lambda: len(busy.jobs) == 4)
    other = two.routers[1].server.state.registry
    eventually(lambda: other.named("decode-0").load.requests == 4)
    assert other.named("decode-0").load.rows == 4
    idle = two.add_worker("decode-1")
    assert post(two.routers[1]).status_code == 200
    assert len(idle.generated) == 1
    busy.hold.clear()
    assert all(answer.result(20).status_code == 200 for answer in answers)
    two.each(is_idle)


@pytest.mark.parametrize("policy", ["least_loaded", "cost"])
def test_arrivals_at_both_routers_between_two_reports_are_spread(model_folder, policy, monkeypatch):
    monkeypatch.setattr("router.workers.registry.HEARTBEAT_INTERVAL_S", 10.0)
    with TwoRouters(model_folder, worker_timeout=30, placement=policy) as two, ThreadPoolExecutor(64) as pool:
        workers = [two.add_worker(f"decode-{index}", heartbeat_s=10) for index in range(4)]
        for worker in workers:
            worker.hold.set()
        answers = [pool.submit(post, two.routers[number % 3 % 2], max_tokens=1) for number in range(64)]
        eventually(lambda: sum(len(worker.generated) for worker in workers) == 64)
        counts = [len(worker.generated) for worker in workers]
        assert max(counts) <= 1.2 * min(counts)
        for worker in workers:
            worker.hold.clear()
        assert all(answer.result(20).status_code == 200 for answer in answers)


def test_a_drain_through_one_router_moves_the_requests_of_both(two, pool):
    leaving = two.add_worker("decode-0")
    leaving.stall_after = 5
    answers = [pool.submit(post, router, max_tokens=40, return_token_ids=True) for router in two.routers]
    two.each(lambda router: emitted(router) == [5])
    staying = two.add_worker("decode-1")
    report = two.routers[1].http.post("/workers/decode-0/drain")
    assert report.status_code == 200 and report.json()["moved"] == 1
    expected = echo_script(leaving.generated[0])[:40]
    assert [token_ids(answer.result(20)) for answer in answers] == [expected] * 2
    assert leaving.has_left.wait(20) and not leaving.jobs
    assert len(staying.generated) == 2
    two.each(lambda router: [w.key.worker_id for w in router.server.state.registry] == ["decode-1"])
    two.each(is_idle)


@pytest.mark.parametrize(("call", "body"), [("drain", {}), ("role", {"role": "prefill"})])
def test_of_the_last_two_decode_workers_one_stays(two, pool, call, body):
    """Operators drain them through different routers, which do not know of each other's drain yet."""
    slots = make_slots(ServeConfig(prefill_replicas=0, decode_replicas=2))
    both_asked, launcher = threading.Barrier(2), threading.Lock()

    def decide(worker_id: str, for_good: bool) -> str:
        both_asked.wait(20)
        with launcher:
            return let_go(slots, worker_id, for_good)

    for index, router in enumerate(two.routers):
        router.server.on_leave(decide, lambda *renewed: None)
        two.add_worker(f"decode-{index}")
    two.each(lambda router: len(router.server.state.registry.live()) == 2)
    calls = [
        pool.submit(router.http.post, f"/workers/decode-{index}/{call}", json=body)
        for index, router in enumerate(two.routers)
    ]
    answers = sorted((done.result(20) for done in calls), key=lambda answer: answer.status_code)
    assert [answer.status_code for answer in answers] == [200, 409]
    assert "cannot be spared: no other decode worker stays" in answers[1].text
    two.each(lambda router: len(router.server.state.registry.live()) == 1)
    assert all(post(router, max_tokens=2).status_code == 200 for router in two.routers)


def test_a_role_change_through_one_router_excludes_a_drain_through_another(two, pool):
    leaving = two.add_worker("decode-0")
    leaving.stall_after = 5
    answers = [pool.submit(post, router, max_tokens=8) for router in two.routers]
    two.each(lambda router: emitted(router) == [5])
    two.add_worker("decode-1").prefetches = None
    two.each(lambda router: len(router.server.state.registry.live()) == 2)
    changed = pool.submit(two.routers[0].http.post, "/workers/decode-0/role", json={"role": "prefill"})
    two.each(lambda router: router.server.state.registry.named("decode-0").draining)
    refused = two.routers[1].http.post("/workers/decode-0/drain", json={})
    assert (refused.status_code, "changes its role" in refused.text) == (409, True)
    leaving.stall_after = 100
    assert [answer.result(20).status_code for answer in (*answers, changed)] == [200] * 3


def test_a_leaving_worker_waits_for_every_router_with_requests_on_it(two, pool):
    leaving = two.add_worker("decode-0")
    leaving.stall_after = 5
    answer = pool.submit(post, two.routers[1], max_tokens=40)
    eventually(lambda: emitted(two.routers[1]) == [5])
    two.add_worker("decode-1").prefetches = None
    assert two.routers[0].http.post("/workers/decode-0/drain").status_code == 200
    two.each(lambda r: "decode-0" not in [w.key.worker_id for w in r.server.state.registry.live()])
    assert not leaving.has_left.is_set()
    leaving.stall_after = 100
    assert answer.result(20).status_code == 200
    assert leaving.has_left.wait(20)


def test_a_restarted_router_learns_of_the_workers(two, pool):
    two.add_worker("decode-0")
    first = two.routers[1].server.state.incarnation
    other = pool.submit(post, two.routers[0], max_tokens=300)
    router = two.restart(1)
    assert router.server.state.incarnation != first
    two.each(lambda router: len(router.server.state.registry.live()) == 1)
    assert post(router).status_code == 200
    assert other.result(20).status_code == 200
    two.each(is_idle)


def test_a_dead_worker_is_not_asked_to_register(two):
    two.add_worker("decode-0")
    router = two.routers[0]
    worker = two.workers[0]
    router.server.mark_dead(worker.worker_id, worker.incarnation, "it is thought to be dead")
    dropped = router.metric("tandem_messages_dropped_total", reason="stale_incarnation")
    eventually(
        lambda: router.metric("tandem_messages_dropped_total", reason="stale_incarnation") > dropped + 2
    )
    assert not router.server.state.registry.live()


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_other_routers_count(shared):
    registry = Registry(2.0, 16, shared)
    state = WorkerState(
        worker_id="w", incarnation="i", role="decode", num_running=6, total_blocks=100, free_blocks=60
    )
    registry.register(registration(state=state))
    load = registry.named("w").load
    assert (load.rows, load.context_tokens) == ((6, 640) if shared else (0, 0))
    registry.named("w").outstanding_rows = 2
    registry.named("w").outstanding_context = 200
    registry.update(state)
    assert (load.rows, load.context_tokens) == ((6, 640) if shared else (2, 200))


def test_routers_share_stored_responses(model_folder, tmp_path):
    """The file serves all routers, since a client may come back to any of them."""
    with TwoRouters(model_folder, response_store=str(tmp_path / "responses")) as two:
        two.add_worker("decode-0")
        one, other = (router.http for router in two.routers)
        first = one.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json()
        assert other.get(f"/v1/responses/{first['id']}").json() == first
        following = {"input": "y", "max_output_tokens": 2, "previous_response_id": first["id"]}
        assert other.post("/v1/responses", json=following).status_code == 200
        assert other.delete(f"/v1/responses/{first['id']}").json()["deleted"]
        assert one.post("/v1/responses", json=following).status_code == 400
