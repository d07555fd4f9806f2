"""A day in the simulator: workers come and go by the router's own decisions, and the SLO is kept."""

from __future__ import annotations

import pytest

from bench.autoscale import MOST as MOST_OF_ALL
from bench.autoscale import SLO as SLO_OF_ALL
from bench.autoscale import START_S, larger
from bench.day import arrivals, over_a_day, synthetic
from bench.scaled_cluster import Elasticity, ScalingCluster, attained, fewest, scaled, windows
from planner.profile import DEFAULT_PROFILE, read_profile
from planner.request import simulated
from planner.scenarios import Scenario, Slo, Study
from planner.trace import TRACE_BLOCK_TOKENS
from protocol.scaling import WorkerRange
from router.scaling.decide import ATTAINMENT, ScalingPolicy
from tests.planner.planned import profile

SLO = Slo(30.0, 0.1)
HOUR_S = 3600.0
ONE_EACH = Scenario("conditional", 1, 1)
MOST = Scenario("conditional", 5, 5)
RANGES = {"prefill": WorkerRange(1, 5), "decode": WorkerRange(1, 5)}


def study(count: int = 4000, day_s: float = 86_400.0) -> Study:
    requests = synthetic(count, 1, 8000, 500, day_s)
    using = profile(kv_tokens=400_000, itl_budget_s=0.05, chunk_tokens=2048)
    return Study(using, requests, TRACE_BLOCK_TOKENS, SLO)


def elasticity(most_workers: int = 10, down_after_s: float = 300.0) -> Elasticity:
    return Elasticity(ScalingPolicy(RANGES, down_after_s), start_s=30.0, most_workers=most_workers)


def test_all_requests_end_and_every_worker_is_counted_once():
    day = study(300, 6000.0)
    requests = [simulated(request, TRACE_BLOCK_TOKENS) for request in day.requests]
    cluster = ScalingCluster(
        ONE_EACH.layout(SLO), day.profile, TRACE_BLOCK_TOKENS, elasticity(down_after_s=60.0)
    )
    cluster.run(requests)
    assert cluster.num_ended == len(requests)
    changes = [change for _, decision in cluster.decisions for change in decision.targets.items()]
    assert changes, "it scales"
    end = max(request.ended for request in requests)
    assert 2 * end <= cluster.worker_s <= 10 * end


def test_without_room_a_role_gives_a_worker():
    day = study(400, 3000.0)
    _, cluster = scaled(day, elasticity(most_workers=4, down_after_s=600.0), Scenario("conditional", 1, 3))
    assert any(decision.changes_role == ("decode", "prefill") for _, decision in cluster.decisions)
    assert len(cluster.workers) <= 4


@pytest.mark.parametrize(("count", "seed"), [(1000, 22), (700, 23)])
def test_a_day_is_served_within_the_slo_with_few_more_workers_than_in_hindsight(count: int, seed: int):
    """Of four hours, with fresh seeds: constants were chosen by others."""
    requests = synthetic(count, seed, 12_000, 600, 4 * HOUR_S)
    day = Study(larger(read_profile(DEFAULT_PROFILE)), requests, TRACE_BLOCK_TOKENS, SLO_OF_ALL)
    ranges = {"prefill": WorkerRange(1, MOST_OF_ALL.prefill), "decode": WorkerRange(1, MOST_OF_ALL.decode)}
    grows = Elasticity(ScalingPolicy(ranges), START_S, MOST_OF_ALL.prefill + MOST_OF_ALL.decode)
    attainment, cluster = scaled(day, grows, ONE_EACH)
    few = [fewest(each, MOST_OF_ALL, ATTAINMENT) for each in windows(day, HOUR_S)]
    assert attainment >= ATTAINMENT
    assert cluster.worker_s <= 1.25 * sum(few) * HOUR_S


def test_hindsight_finds_the_smallest_layout():
    piece = study(60, 600.0)
    found = fewest(piece, MOST, 0.9)
    smaller = [(p, d) for p in range(1, 6) for d in range(1, 6) if p + d < found]
    assert all(attained(piece, Scenario("conditional", *each)) < 0.9 for each in smaller)


def test_a_day_has_tides():
    day = arrivals(10_000, 1)
    assert day == sorted(day) and len(day) == 10_000 and day[0] >= 0 and day[-1] <= 86_400
    night, morning = (sum(start <= at / 3600 < start + 2 for at in day) for start in (1, 10))
    assert morning > 3 * night
    trace = synthetic(50, 2, 1000, 100)
    again = over_a_day(trace, 3)
    assert [each.hash_ids for each in again] == [each.hash_ids for each in trace]
