"""The router sends workers a short queue ahead, and chooses fairly among the requests that wait."""

from __future__ import annotations

import random

import pytest

from protocol.costs import StepCosts
from router.dispatch import placer
from tests.router.router_clients import ask_and_leave, eventually, is_idle, lose, make_pair

KEYS = ("first-key", "second-key")
ROWS = 2
AHEAD = ROWS + 2
"""Requests sent ahead to a worker without measurements."""


@pytest.fixture
def router(make_router):
    return make_router(max_num_seqs=ROWS, api_key=", ".join(KEYS), drain_timeout=1.0)


def ask(pool, router, key: int, count: int = 1, **fields) -> list:
    """Send requests, and return once the router has them."""
    before = len(router.server.state.journal)
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    body = {"prompt": "the quick brown fox", "max_tokens": 3, **fields}
    asked = [
        pool.submit(router.http.post, "/v1/completions", json=body, headers=headers) for _ in range(count)
    ]
    eventually(lambda: len(router.server.state.journal) == before + count)
    return asked


def held(router, key: int = 0) -> int:
    return int(router.metric("tandem_num_requests_held", api_key=str(key)))


def test_workers_get_a_short_queue_and_the_rest_waits(router, pool):
    worker = router.add_worker()
    worker.hold.set()
    asked = ask(pool, router, 0, count=30)
    eventually(lambda: held(router) == 30 - AHEAD)
    assert len(worker.generated) == AHEAD
    workers = router.http.get("/workers", headers={"authorization": f"Bearer {KEYS[0]}"}).json()["workers"]
    assert workers[0]["outstanding_requests"] == 30
    worker.hold.clear()
    assert [each.result(20).status_code for each in asked] == [200] * 30
    ids = [request.request_id for request in worker.generated]
    assert len(set(ids)) == len(ids) == 30
    assert held(router) == 0
    assert router.metric("tandem_request_held_seconds_total", api_key="0") > 0
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize("split", [False, True])
def test_after_short_answers_long_ones_are_not_all_sent_ahead(make_router, pool, monkeypatch, split):
    """Fast workers finish hundreds of short answers in `AHEAD_S`; as many long ones must not be sent."""
    monkeypatch.setattr(placer, "FIRST_OUTPUT", 1.0)
    rows = 4
    router = make_router(max_num_seqs=rows, api_key=", ".join(KEYS))
    costs = StepCosts(step_s=1e-4, row_s=0.0, context_s=0.0, token_s=1e-7, attention_s=0.0)
    pair = make_pair(router, costs=costs) if split else [router.add_worker(costs=costs)]
    pair[0].hold.set()
    flood = ask(pool, router, 0, count=30, max_tokens=50)
    single = ask(pool, router, 1, max_tokens=4)
    eventually(lambda: held(router) == 30 - 2 * rows)
    pair[0].hold.clear()
    assert [each.result(20).status_code for each in (*single, *flood)] == [200] * 31
    lengths = [request.sampling.max_tokens for request in pair[0].generated]
    assert lengths.index(4) == 2 * rows, "it came next"


def test_a_first_token_makes_room_for_the_next_prompt_at_once(make_router, pool):
    """The router need not wait for its periodic look at all queues."""
    router = make_router(max_num_seqs=16, api_key=", ".join(KEYS))
    router.server.state.placer.ahead.check_all = lambda: None
    worker = router.add_worker(costs=StepCosts(token_s=0.1, chunk_tokens=1), stall_after=1)
    worker.hold.set()
    asked = ask(pool, router, 0, count=6)
    eventually(lambda: held(router) == 4)
    worker.hold.clear()
    eventually(lambda: len(worker.generated) == 6)
    worker.stall_after = 3
    assert [each.result(20).status_code for each in asked] == [200] * 6


def test_a_flood_starves_nobody_on_a_pair_under_cost(make_router, pool):
    """Both workers serve the flood, each from its own queue."""
    router = make_router(max_num_seqs=ROWS, api_key=", ".join(KEYS), placement="cost")
    costs = StepCosts(step_s=2e-3, row_s=1e-3, context_s=0.0, token_s=1e-4, attention_s=0.0)
    started: list[tuple[str, int]] = []
    pair = make_pair(router, step_s=2e-3, costs=costs)
    for worker in pair:

        def script(request, name=worker.worker_id, usual=worker.script):
            started.append((name, request.sampling.max_tokens))
            return usual(request)

        worker.script = script
        worker.hold.set()
    flood = []
    for length in random.Random(1).choices((20, 200, 400), k=60):
        flood += ask(pool, router, 0, prompt=[2] * length, max_tokens=40)
    for worker in pair:
        worker.hold.clear()
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    for length in (20, 400, 200, 20):
        before = len(started)
        body = {"prompt": [1] * length, "max_tokens": 5}
        assert router.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        came_before = [tokens for _, tokens in started[before:]].index(5)
        assert came_before <= 2 * AHEAD, "no more of the flood than both workers have at a time"
    assert held(router) > 10, "the flood goes on"
    assert [each.result(20).status_code for each in flood] == [200] * 60
    assert {name for name, _ in started} == {"prefill-0", "decode-0"}


def test_urgent_requests_come_before_the_turns(router, pool):
    worker = router.add_worker()
    worker.hold.set()
    asked = ask(pool, router, 0, count=10)
    asked += ask(pool, router, 1, count=1, max_tokens=5)
    asked += ask(pool, router, 0, count=1, max_tokens=4, priority=-1)
    worker.hold.clear()
    assert [each.result(20).status_code for each in asked] == [200] * 12
    assert [request.sampling.max_tokens for request in worker.generated][AHEAD : AHEAD + 2] == [4, 5]


def test_a_request_given_up_while_it_waits_was_never_sent(router, pool):
    worker = router.add_worker()
    worker.hold.set()
    asked = ask(pool, router, 0, count=10)
    ask_and_leave(router, lambda: held(router, 1) == 1, key=KEYS[1], max_tokens=9)
    eventually(lambda: len(router.server.state.journal) == 10)
    assert held(router, 1) == 0
    worker.hold.clear()
    assert [each.result(20).status_code for each in asked] == [200] * 10
    assert 9 not in [request.sampling.max_tokens for request in worker.generated]
    assert worker.aborted == []
    eventually(lambda: is_idle(router))


def test_a_dead_workers_queue_goes_to_another(router, pool):
    """The waiting request did not cause the death."""
    worker = router.add_worker("decode-0")
    worker.hold.set()
    asked = ask(pool, router, 0, count=20)
    other = router.add_worker("decode-1")
    lose(router, worker)
    assert [each.result(20).status_code for each in asked] == [200] * 20
    assert len(other.generated) == 20
    failures = [request.failures for request in router.server.state.journal]
    assert not any(failures)
    eventually(lambda: is_idle(router))


def test_a_decode_worker_that_dies_before_the_prompt_was_sent_is_replaced(router, pool):
    prefill, decode = make_pair(router)
    prefill.hold.set()
    asked = ask(pool, router, 0, count=20)
    eventually(lambda: held(router) > 5)
    prefill.peers["decode-1"] = router.add_worker("decode-1")
    lose(router, decode)
    prefill.hold.clear()
    assert [each.result(20).status_code for each in asked] == [200] * 20
    eventually(lambda: is_idle(router))
    assert held(router) == 0


def test_full_rows_hold_prompts_back(router, pool):
    """The prefill worker is fast, and the decode worker has two rows."""
    prefill, decode = make_pair(router)
    decode.hold.set()
    asked = ask(pool, router, 0, count=20)
    eventually(lambda: len(prefill.generated) >= AHEAD)
    eventually(lambda: held(router) == 20 - len(prefill.generated))
    assert len(prefill.generated) <= AHEAD + 1
    decode.hold.clear()
    assert [each.result(20).status_code for each in asked] == [200] * 20


def test_a_request_that_has_begun_waits_for_nobody(router, pool):
    """Its client has already seen tokens."""
    first = router.add_worker("decode-0")
    first.stall_after = 2
    running = ask(pool, router, 0, max_tokens=6)
    eventually(lambda: [len(r.output_token_ids) for r in router.server.state.journal] == [2])
    second = router.add_worker("decode-1")
    second.hold.set()
    flood = ask(pool, router, 0, count=20)
    lose(router, first)
    eventually(lambda: 6 in [request.sampling.max_tokens for request in second.generated])
    second.hold.clear()
    assert [each.result(20).status_code for each in running + flood] == [200] * 21


def test_an_slo_counts_only_requests_that_come_before(router, pool):
    """Another key's flood does not make this key's request late."""
    worker = router.add_worker()
    worker.hold.set()
    flood = ask(pool, router, 0, count=40, prompt=list(range(2, 302)))
    body = {"prompt": list(range(2, 302)), "max_tokens": 3}
    slo = {"x-slo-ttft-ms": "700"}

    def with_key(key: int) -> dict[str, str]:
        return {"authorization": f"Bearer {KEYS[key]}", **slo}

    refused = router.http.post("/v1/completions", json=body, headers=with_key(0))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "slo_ttft")
    taken = pool.submit(router.http.post, "/v1/completions", json=body, headers=with_key(1))
    eventually(lambda: held(router, 1) == 1)
    worker.hold.clear()
    assert [each.result(20).status_code for each in [taken, *flood]] == [200] * 41
