"""Keys take turns: the queue equals a plain algorithm, and the router waits, sends and moves by it."""

from __future__ import annotations

import random
from collections import Counter

import httpx
import pytest

from protocol.costs import StepCosts
from router.dispatch import placer
from router.dispatch.send_ahead import QUANTUM, FairQueue
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


def test_without_keys_clients_take_turns_by_address(make_router, pool):
    router = make_router(max_num_seqs=ROWS)
    worker = router.add_worker()
    worker.hold.set()
    body = {"prompt": "the quick brown fox", "max_tokens": 3}
    flood = [pool.submit(router.http.post, "/v1/completions", json=body) for _ in range(20)]
    eventually(lambda: held(router) == 20 - AHEAD)
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(base_url=router.http.base_url, transport=transport, timeout=20) as other:
        single = pool.submit(other.post, "/v1/completions", json=body | {"max_tokens": 4})
        eventually(lambda: held(router) == 21 - AHEAD)
        worker.hold.clear()
        assert [each.result(20).status_code for each in (single, *flood)] == [200] * 21
    lengths = [request.sampling.max_tokens for request in worker.generated]
    assert lengths.index(4) == AHEAD, "it came next"
    eventually(lambda: is_idle(router))


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


NOTHING: Counter[str] = Counter()


def queue_of(sent: Counter[str] = NOTHING) -> FairQueue[str]:
    return FairQueue(sent.__getitem__)


def drain(queue: FairQueue[str]) -> list[str]:
    order = []
    while len(queue):
        order.append(queue.head())
        queue.pop(order[-1])
    return order


def test_a_single_request_comes_before_a_flood() -> None:
    sent = Counter({"a": 30_000})
    queue = queue_of(sent)
    for index in range(64):
        queue.add(f"flood {index}", "a", 0, 600)
    queue.pop(queue.head())
    queue.add("single", "b", 0, 600)
    assert queue.head() == "single"


def test_a_key_with_more_at_the_worker_owes_the_difference() -> None:
    """A key with as much at the worker as the flood gets nothing in advance."""
    queue = queue_of(Counter({"a": 3 * QUANTUM, "b": 3 * QUANTUM}))
    for index in range(8):
        queue.add(f"flood {index}", "a", 0, QUANTUM)
        queue.add(f"other {index}", "b", 0, QUANTUM)
    assert Counter(item.split()[0] for item in drain(queue)[:6]) == {"flood": 3, "other": 3}
    queue = queue_of(Counter({"a": 3 * QUANTUM, "b": 0}))
    for index in range(8):
        queue.add(f"flood {index}", "a", 0, QUANTUM)
        queue.add(f"other {index}", "b", 0, QUANTUM)
    assert Counter(item.split()[0] for item in drain(queue)[:5]) == {"flood": 1, "other": 4}


def test_urgent_requests_come_first_whatever_their_key_had() -> None:
    queue = queue_of()
    for index in range(4):
        queue.add(f"0 {index}", "a", 0, 10)
    queue.add("1 urgent", "b", -1, 10**6)
    queue.add("1 idle", "b", 5, 1)
    order = drain(queue)
    assert (order[0], order[-1]) == ("1 urgent", "1 idle")


def test_nothing_is_lost_or_doubled() -> None:
    """Requests come, go and are given up in any order."""
    rng = random.Random(7)
    queue, waiting, gone = queue_of(), set[str](), set[str]()
    for index in range(5000):
        what = rng.random()
        if what < 0.5 or not waiting:
            item = str(index)
            queue.add(item, rng.choice("abcde"), rng.choice([0, 0, 0, 1]), rng.expovariate(1 / 700))
            waiting.add(item)
        elif what < 0.8:
            item = queue.head()
            assert item == queue.head()
            queue.pop(item)
            waiting.remove(item)
            gone.add(item)
        else:
            item = rng.choice(sorted(waiting))
            queue.remove(item)
            waiting.remove(item)
            gone.add(item)
        assert len(queue) == len(waiting)
        assert item in queue or item in gone
    assert set(drain(queue)) == waiting
    assert not queue._turns


def test_a_huge_cost_takes_no_more_turns() -> None:
    queue = queue_of()
    for key in "ab":
        queue.add(key, key, 0, 1e15)
    assert drain(queue) == ["a", "b"]


def test_turns_are_those_of_the_plain_algorithm() -> None:
    """Compares turn by turn with the algorithm as published. The queue skips turns in which nobody goes."""
    rng = random.Random(3)
    queue = queue_of()
    flows: dict[str, list[tuple[str, float]]] = {}
    deficits: dict[str, float] = {}

    def head() -> tuple[str, str, float]:
        while True:
            key, flow = next(iter(flows.items()))
            if len(flows) == 1 or flow[0][1] <= deficits[key]:
                return key, *flow[0]
            deficits[key] += QUANTUM
            flows[key] = flows.pop(key)

    for index in range(4000):
        what = rng.random()
        if what < 0.5 or not flows:
            key, cost = rng.choice("abcd"), rng.choice([1.0, QUANTUM, rng.expovariate(1 / 300)])
            queue.add(str(index), key, 0, cost)
            if key not in flows:
                flows[key], deficits[key] = [], 0.0
                if len(flows) == 2:
                    deficits = dict.fromkeys(flows, 0.0)
            flows[key].append((str(index), cost))
            continue
        key, item, cost = head()
        assert queue.head() == item
        if what < 0.9:
            queue.pop(item)
            deficits[key] -= cost if len(flows) > 1 else 0.0
        else:
            key = rng.choice(sorted(flows))
            item, _ = rng.choice(flows[key])
            queue.remove(item)
        flows[key] = [each for each in flows[key] if each[0] != item]
        if not flows[key]:
            del flows[key]


def test_the_number_of_requests_that_a_request_would_overtake() -> None:
    queue = queue_of()
    for index in range(10):
        queue.add(f"flood {index}", "a", 0, 100)
        queue.add(f"idle {index}", "a", 1, 100)
    assert queue.overtaken(key="a", priority=0, cost=100) == 10
    assert queue.overtaken(key="b", priority=0, cost=100) == 19
    assert queue.overtaken(key="b", priority=0, cost=2000) == 10
    assert queue.overtaken(key="b", priority=2, cost=100) == 0
    queue.add("own", "c", 0, 300)
    assert queue.overtaken(key="c", priority=0, cost=100) == pytest.approx(10 * 0.6 + 10), (
        "its own comes first"
    )
