"""Placement policies under simulated arrivals, and what `cost` takes among equal options."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import msgspec
import pytest
from msgspec.structs import replace

from planner.cluster import SimulatedCluster, SimulatedRequest
from planner.profile import LinkProfile
from router.placement import RULES, placement_policy
from router.placement.by_cost import cost
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState
from tests.planner.planned import layout, profile, request, run
from tests.router.placed import COSTS, decode, facts, placed, prefill

BALANCING = sorted(set(RULES) - {"power_of_two"})
MEASURED = {name: getattr(COSTS, name) for name in COSTS.__struct_fields__}
USUAL = profile(**MEASURED)
SLOW_LINK = profile(link=LinkProfile(latency_s=1e-4, bytes_per_s=1e7), **MEASURED)


def poisson(rate: float, seconds: float, seed: int, *shape: int) -> list[SimulatedRequest]:
    rng, at, requests = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        requests.append(request(at, *shape))
    return requests


def in_order(*requests: SimulatedRequest) -> list[SimulatedRequest]:
    return sorted(requests, key=lambda each: each.trace.arrival)


def decoded(requests: Sequence[SimulatedRequest]) -> Counter[str]:
    return Counter(each.workers["decode"] for each in requests)


@pytest.mark.parametrize("policy", BALANCING)
def test_arrivals_between_two_load_reports_are_spread(policy):
    requests = [request(0.0, 256, 64) for _ in range(64)]
    run(layout(0, 4, policy), requests, USUAL)
    counts = decoded(requests).values()
    assert len(counts) == 4 and max(counts) <= 1.2 * min(counts)


@pytest.mark.parametrize("policy", sorted(RULES))
def test_paced_sessions_are_not_all_put_on_one_worker(policy):
    """Nothing is in flight when a request arrives. Workers' measurements differ slightly."""
    cluster = SimulatedCluster(layout(0, 4, policy), USUAL)
    for index, worker in enumerate(cluster.workers.values()):
        step_s = COSTS.step_s * (1 + index / 200)
        worker.known.load.costs = msgspec.structs.replace(worker.known.load.costs, step_s=step_s)
    requests = [request(float(index), 256, 64) for index in range(80)]
    cluster.run(requests)
    assert max(decoded(requests).values()) <= (40 if policy == "power_of_two" else 24)


@pytest.mark.parametrize("policy", ["cost", "cache_aware"])
def test_a_hot_prefix_is_replicated_and_another_keeps_its_worker(policy):
    """The hot prefix needs three times one worker's capacity. Fetching would take longer than computing."""
    hot_only = [request(0.0, 2000, 32, 1), *(request(9.0, 2000, 32, 1) for _ in range(60))]
    run(layout(0, 1), hot_only, SLOW_LINK)
    capacity = 60 / (max(each.ended for each in hot_only) - 9.0)
    first = request(0.0, 2000, 32, 2)
    hot = [request(5.0 + each.trace.arrival, 2000, 32, 1) for each in poisson(3 * capacity, 4.0, 1, 2000, 32)]
    cold = [request(5.5 + index / 4, 2000, 32, 2) for index in range(12)]
    run(layout(0, 4, policy), in_order(first, *hot, *cold), SLOW_LINK)
    used = decoded(hot)
    assert len(used) >= 3 and max(used.values()) <= 0.6 * len(hot)
    at_home = decoded(cold)[first.workers["decode"]]
    assert at_home >= 9 or policy == "cache_aware", "that one leaves its worker for a moment's load"


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "cache_aware"])
def test_a_jump_to_twice_the_capacity_does_not_oscillate(policy):
    """Queues grow evenly without bursts, and afterwards all workers are used at once."""
    requests = poisson(60.0, 4.0, 2, 512, 64)
    run(layout(2, 2, policy), requests, USUAL)
    firsts = [next(iter(each.workers.values())) for each in requests]
    for begin in range(0, len(firsts) - 40, 40):
        assert max(Counter(firsts[begin : begin + 40]).values()) <= 0.75 * 40
    late = [each.ttft_s for each in requests]
    swings = sum(b < 0.5 * a for a, b in pairwise(late[20:]))
    assert swings <= 0.1 * len(late), "the time to the first token grows, it does not jump"


def test_cost_is_no_worse_than_any_other_policy():
    """Mixed lengths and some shared prefixes, at 70 % of the workers' capacity."""

    def latency(policy: str) -> float:
        requests = poisson(14.0, 8.0, 3, 200, 100) + poisson(3.0, 8.0, 4, 3000, 20)
        requests += poisson(4.0, 8.0, 5, 1500, 50, 1)
        run(layout(2, 2, policy), in_order(*requests), USUAL)
        return mean(each.ended - each.trace.arrival for each in requests)

    others = {policy: latency(policy) for policy in sorted(set(RULES) - {"cost"})}
    assert latency("cost") <= min(others.values())


@pytest.mark.parametrize("policy", sorted(RULES))
def test_a_decision_among_thousands_examines_a_few(policy):
    """The test counts calls, which do not depend on the machine's load."""

    def calls(count: int) -> int:
        workers = [prefill(f"p{index}") for index in range(count // 2)]
        workers += [decode(f"d{index}") for index in range(count // 2)]
        cluster, state, counted = Cluster(workers), PolicyState(), 0
        rule = placement_policy(policy)
        request = facts(num_tokens=8000, cached_tokens={f"d{index}": 64 * index for index in range(8)})

        def count_call(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            for _ in range(50):
                placement, state = rule.place(request, cluster, state)
                worker = cluster.get(placement.workers["decode"])
                assert worker is not None
                worker.requests += 1
                cluster.put(worker)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(4096) < 1.2 * calls(256)


SLOW_PROMPTS = replace(COSTS, token_s=1e-3)
SLOW_STEPS = replace(COSTS, step_s=3e-3)


def test_of_equal_decode_workers_the_least_recently_asked_is_taken():
    workers = [decode("d0", last_placed=5), decode("d1", last_placed=2)]
    for order in (workers, workers[::-1]):
        assert cost(facts(), Cluster(order), "decode", PolicyState()).worker_id == "d1"


def test_of_equal_workers_the_one_with_more_cached_is_taken():
    workers = [decode("d0", last_placed=6), decode("d1", last_placed=1)]
    assert placed("cost", workers, facts(cached_tokens={"d0": 1})).workers == {"decode": "d0"}


def test_of_equal_options_one_worker_is_preferred_to_two():
    workers = [prefill("a", costs=SLOW_STEPS, last_placed=1), decode("b", last_placed=1)]
    assert placed("cost", workers, facts(output_tokens=2000)).workers == {"decode": "b"}


def test_of_equal_pairs_the_least_recently_asked_is_taken():
    d0, d1 = (decode(f"d{i}", costs=SLOW_PROMPTS, last_placed=9 - 4 * i) for i in range(2))
    found = placed("cost", [prefill("p", costs=SLOW_STEPS), d0, d1], facts(num_tokens=2000))
    assert found.workers == {"prefill": "p", "decode": "d1"}
