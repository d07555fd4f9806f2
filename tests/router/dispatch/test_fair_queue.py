"""Deficit round robin among API keys."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.dispatch.send_ahead import QUANTUM, FairQueue

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
