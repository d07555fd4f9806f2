"""The policy `cost` chooses among equal options."""

from __future__ import annotations

from msgspec.structs import replace

from router.placement.by_cost import cost
from router.placement.cluster import Cluster
from router.placement.interface import PolicyState
from tests.router.placed import COSTS, decode, facts, placed, prefill

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
