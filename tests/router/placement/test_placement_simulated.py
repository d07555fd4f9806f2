"""Effects of policies on a cluster, in simulated time."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import pairwise
from math import inf
from statistics import mean

import msgspec
import pytest

from router.placement import RULES, placement_policy
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState
from tests.router.placed import COSTS, decode, facts, prefill
from tests.router.placement_simulator import SLOW, Job, Simulation

FOUR = [f"decode-{index}" for index in range(4)]
BALANCING = sorted(set(RULES) - {"power_of_two"})


def poisson(rate: float, seconds: float, seed: int, **fields) -> list[Job]:
    rng, at, jobs = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        jobs.append(Job(at, **fields))
    return jobs


@pytest.mark.parametrize("policy", BALANCING)
def test_arrivals_between_two_load_reports_are_spread(policy):
    simulation = Simulation(policy, FOUR)
    for _ in range(64):
        simulation.place(Job(0.0))
    counts = [simulation.placed[name] for name in FOUR]
    assert max(counts) <= 1.2 * min(counts)


@pytest.mark.parametrize("policy", sorted(RULES))
def test_paced_sessions_are_not_all_put_on_one_worker(policy):
    """Nothing is in flight when a request arrives. Workers' measurements differ slightly."""
    simulation = Simulation(policy, FOUR)
    for index, worker in enumerate(simulation.workers.values()):
        worker.load.costs = msgspec.structs.replace(COSTS, step_s=COSTS.step_s * (1 + index / 200))
    simulation.run([Job(float(index)) for index in range(80)])
    counts = [simulation.placed[name] for name in FOUR]
    assert max(counts) <= (40 if policy == "power_of_two" else 24)


@pytest.mark.parametrize("policy", ["cost", "cache_aware"])
def test_a_hot_prefix_is_replicated_and_another_keeps_its_worker(policy):
    """The hot prefix needs three times one worker's capacity. Fetching would take longer than computing."""
    simulation = Simulation(policy, FOUR, SLOW)
    simulation.run([Job(0.0, 2000, 32, "cold")])
    home = max(simulation.placed, key=simulation.placed.__getitem__)
    alone = Simulation(policy, FOUR[:1])
    alone.run([Job(0.0, 2000, 32, "hot")])
    served = alone.run([Job(9.0, 2000, 32, "hot") for _ in range(60)])
    capacity = 60 / (max(job.end_s for job in served) - 9.0)
    hot = poisson(3 * capacity, 4.0, 1, num_tokens=2000, output_tokens=32, prefix="hot")
    cold = [Job(0.5 + index / 4, 2000, 32, "cold") for index in range(12)]
    simulation.run(hot + cold)
    used = Counter(job.workers["decode"].load.worker_id for job in hot)
    assert len(used) >= 3 and max(used.values()) <= 0.6 * len(hot)
    at_home = sum(job.workers["decode"].load.worker_id == home for job in cold)
    assert at_home >= 9 or policy == "cache_aware", "that one leaves its worker for a moment's load"


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "cache_aware"])
def test_a_jump_to_twice_the_capacity_does_not_oscillate(policy):
    """Queues grow evenly without bursts, and afterwards all workers are used at once."""
    simulation = Simulation(policy, ["prefill-0", "prefill-1", "decode-0", "decode-1"])
    jobs = simulation.run(poisson(60.0, 4.0, 2, num_tokens=512, output_tokens=64))
    firsts = [next(iter(job.workers.values())).load.worker_id for job in jobs]
    for begin in range(0, len(firsts) - 40, 40):
        counts = Counter(firsts[begin : begin + 40])
        assert max(counts.values()) <= 0.75 * 40
    late = [job.first_s for job in jobs]
    swings = sum(b < 0.5 * a for a, b in pairwise(late[20:]))
    assert swings <= 0.1 * len(late), "the time to the first token grows, it does not jump"


@pytest.mark.parametrize(
    ("policy", "rate", "asked"),
    [
        ("cost", 100.0, {"slo_ttft_s": 0.5}),
        ("cost", 100.0, {"slo_ttft_s": 0.5, "slo_tpot_s": 0.02}),
        ("least_loaded", 80.0, {"slo_ttft_s": 0.5, "slo_tpot_s": 0.02}),
    ],
)
def test_at_twice_the_capacity_accepted_requests_keep_their_slo(policy, rate, asked):
    """Some requests are refused all the time, not all or none by turns. Then all are taken again."""

    def good(job: Job) -> bool:
        tpot_s = (job.end_s - job.at - job.first_s) / (job.output_tokens - 1)
        in_time = job.first_s <= asked.get("slo_ttft_s", inf) and tpot_s <= asked.get("slo_tpot_s", inf)
        return job.refusal is None and in_time

    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    calm = [Job(9.0 + index / 10, 512, **asked) for index in range(20)]
    jobs, blind = poisson(rate, 6.0, 2, num_tokens=512, **asked), poisson(rate, 6.0, 2, num_tokens=512)
    lengths = random.Random(7)
    for job, same in zip(jobs, blind, strict=True):  # equal ones would end together
        job.output_tokens = same.output_tokens = lengths.randint(32, 96)
    Simulation(policy, names).run(jobs + calm)
    Simulation(policy, names).run(blind)
    taken = [job for job in jobs if job.refusal is None]
    assert sum(map(good, jobs)) >= 0.8 * len(taken)
    assert sum(map(good, jobs)) >= 2 * sum(map(good, blind))
    counts = Counter(int(2 * job.at) for job in taken)
    after = [counts[half] for half in range(2, 12)]
    assert min(after) >= 0.6 * mean(after)
    assert all(good(job) for job in calm)


def test_waiting_requests_do_not_count_as_slow_decoding():
    """Prefill is the bottleneck, so few requests decode at a time, however many there are."""
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    jobs = poisson(80.0, 6.0, 2, num_tokens=512, output_tokens=64, slo_tpot_s=0.006)
    Simulation("least_loaded", names).run(jobs)
    taken = [job for job in jobs if job.refusal is None]
    late = [job for job in taken if job.end_s - job.at - job.first_s > 63 * 0.006]
    assert len(taken) >= 0.9 * len(jobs) and len(late) <= 0.1 * len(taken)


def test_cost_is_no_worse_than_any_other_policy():
    """Mixed lengths and some shared prefixes, at 70 % of the workers' capacity."""

    def latency(policy: str) -> float:
        jobs = poisson(14.0, 8.0, 3, num_tokens=200, output_tokens=100)
        jobs += poisson(3.0, 8.0, 4, num_tokens=3000, output_tokens=20)
        jobs += poisson(4.0, 8.0, 5, num_tokens=1500, output_tokens=50, prefix="shared")
        names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        return mean(job.end_s - job.at for job in Simulation(policy, names).run(jobs))

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
                worker.requests += 1
                cluster.put(worker)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(4096) < 1.2 * calls(256)
