"""Simulated workers take the times computed by hand, and simulated clusters end each request once."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from planner.cluster import SimulatedRequest
from planner.engine import Clock
from planner.profile import LinkProfile
from planner.scenarios import Slo, Study
from planner.trace import TraceRequest
from protocol.errors import ConfigError
from router.placement import RULES
from tests.planner.planned import BLOCK, layout, profile, request, run

ALONE = layout(0, 1)


def test_a_lone_request_takes_its_steps():
    """Chunks of 400, 400 and 200 tokens take a step's 10 ms each in addition. Nine steps of 11 ms follow."""
    [one] = requests = [request(1.0, 1000, 10)]
    run(ALONE, requests)
    assert one.ttft_s == pytest.approx(3 * 0.01 + 1.0)
    assert one.ended - one.first_token == pytest.approx(9 * 0.011)
    assert one.tpot_s == pytest.approx(0.011)


def test_a_chunk_beside_rows_keeps_within_the_itl_budget():
    """A row's step takes 11 ms, which leaves 20 ms of 31 for a prompt: 20 tokens."""
    requests = [request(0.0, 10, 200), request(0.1, 200, 2)]
    run(ALONE, requests, profile(itl_budget_s=0.031))
    first, second = requests
    assert second.ttft_s == pytest.approx(10 * 0.031, abs=0.011), "ten chunks, after the step that runs"
    steps_s = first.ended - first.first_token - 10 * 0.031
    assert steps_s == pytest.approx(188 * 0.011 + 1 * 0.012)


def test_without_a_budget_the_whole_chunk_is_computed():
    requests = [request(0.0, 10, 200), request(0.1, 200, 1)]
    run(ALONE, requests)
    assert requests[1].ttft_s == pytest.approx(0.011 + 0.2, abs=0.011)


def test_prompts_share_the_token_budget_of_a_step():
    """Both fit into one step of 400 tokens."""
    requests = [request(0.0, 100, 1), request(0.001, 150, 1), request(0.001, 200, 1)]
    run(ALONE, requests)
    first, second, third = requests
    assert first.first_token == pytest.approx(0.11)
    assert second.first_token == third.first_token == pytest.approx(0.11 + 0.01 + 0.35)


def test_a_cached_prefix_is_not_recomputed():
    requests = [request(0.0, 1000, 1, prompt=1), request(5.0, 1000, 1, prompt=1)]
    run(ALONE, requests)
    assert requests[1].ttft_s == pytest.approx(0.011), "its last token alone: a row"


def test_a_request_waits_for_room():
    requests = [request(0.0, 500, 50), request(0.1, 500, 50)]
    run(ALONE, requests, profile(kv_tokens=700))
    assert requests[1].first_token > requests[0].ended


def test_the_last_request_is_preempted_when_room_runs_out():
    """Both fit at first, but not with all that they generate. No token is lost."""
    requests = [request(0.0, 200, 300), request(0.0, 200, 300)]
    cluster = run(ALONE, requests, profile(kv_tokens=800))
    [worker] = cluster.workers.values()
    assert worker.engine.scheduler.num_preemptions > 0
    assert requests[0].ended < requests[1].ended < 100
    assert worker.engine.usage == 0


def test_no_more_than_max_num_seqs_run():
    requests = [request(0.0, 10, 100) for _ in range(3)]
    run(ALONE, requests, profile(max_num_seqs=2))
    assert requests[2].first_token >= requests[0].ended


@pytest.mark.parametrize(("kv_tokens", "preempts"), [(100_000, False), (1000, True)])
def test_a_handed_over_request_waits_for_a_row(kv_tokens: int, preempts: bool):
    """When room runs out, it gives up its own before running requests do."""
    requests = [request(0.0, 200, 250), request(0.0, 200, 250), request(0.0, 200, 250)]
    cluster = run(layout(1, 1, "least_loaded"), requests, profile(kv_tokens, max_num_seqs=2))
    assert requests[2].first_token < requests[0].ended
    assert requests[2].ended - requests[0].ended > 240 * 0.011
    engine = next(each.engine for name, each in cluster.workers.items() if "decode" in name)
    assert (engine.scheduler.num_preemptions > 0) == preempts
    assert engine.usage == 0


def test_accepted_drafts_save_steps():
    [one] = requests = [request(0.0, 10, 101)]
    run(ALONE, requests, profile(tokens_per_row=2.0))
    assert one.ended - one.first_token == pytest.approx(50 * 0.011)


# --- sliding windows ----------------------------------------------------------------------------------


MIXED = (0, 100, 100, 100)


@pytest.mark.parametrize(("windows", "num_running"), [((0,), 2), (MIXED, 5), ((100,), 8)], ids=str)
def test_more_sequences_run_at_once_where_layers_keep_a_window(
    windows: tuple[int, ...], num_running: int
) -> None:
    """The pool has room for two prompts of 1000 tokens.

    A full layer's quarter of a prompt, and windows with the 280 tokens that steps and tiles add, take 460
    tokens' room, and 349 once the prompt is computed.
    """
    requests = [request(0.0, 1000, 900) for _ in range(8)]
    cluster = run(layout(0, 1), requests, profile(kv_tokens=2300, chunk_tokens=100, kv_windows=windows))
    first_end = min(each.ended for each in requests)
    assert sum(each.first_token < first_end for each in requests) == num_running
    [worker] = cluster.workers.values()
    assert worker.engine.usage == 0


def test_a_hand_off_moves_only_the_windows() -> None:
    """The wire takes a second per 1000 tokens: 300 for full layers, else a quarter of 300 and 3/4 of 100."""
    link = LinkProfile(latency_s=0.0, bytes_per_s=1000.0)

    def second_token_s(windows: tuple[int, ...]) -> float:
        [one] = requests = [request(0.0, 300, 2)]
        run(layout(1, 1, "round_robin"), requests, profile(kv_windows=windows, link=link, kv_bytes=1))
        return one.ended - one.first_token

    assert second_token_s((0,)) - second_token_s(MIXED) == pytest.approx(0.15)


def test_a_request_may_be_longer_than_a_pool_of_windows() -> None:
    long = [TraceRequest(0.0, 5000, 10, [1] * 50)]
    Study(profile(kv_tokens=2000, kv_windows=(100,)), long, 100, Slo(1.0, 0.1))
    with pytest.raises(ConfigError, match=r"5010 tokens, .* has room for [34]\d{3}:"):
        Study(profile(kv_tokens=1500, kv_windows=MIXED), long, 100, Slo(1.0, 0.1))


LAYOUTS = [(0, 3), (1, 2), (2, 1), (2, 2)]


def load(seed: int, count: int = 150, rate: float = 6.0) -> list[SimulatedRequest]:
    rng, at, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        requests.append(request(at, rng.randrange(1, 900), rng.randrange(1, 60), rng.randrange(20)))
    return requests


def test_events_happen_in_order():
    events, seen = Clock(), []
    events.at(2.0, lambda: seen.append(("second", events.now)))
    events.at(1.0, lambda: events.at(0.5, lambda: seen.append(("late", events.now))))
    events.at(2.0, lambda: seen.append(("third", events.now)))
    events.run()
    assert seen == [("late", 1.0), ("second", 2.0), ("third", 2.0)]


@pytest.mark.parametrize("policy", sorted(RULES))
@pytest.mark.parametrize(("prefill", "decode"), LAYOUTS)
def test_every_request_ends_once_and_nothing_is_left(policy, prefill, decode):
    """The pool is small, so requests wait, and the SLO refuses some of them."""
    requests = load(1)
    cluster = run(
        layout(prefill, decode, policy, slo_ttft_s=1.2, slo_tpot_s=0.1),
        requests,
        profile(kv_tokens=3000, itl_budget_s=0.02, kv_bytes=10_000, context_s=1e-6),
    )
    for each in requests:
        assert each.trace.arrival <= each.ended < inf
        assert each.is_refused == (each.first_token == inf)
        assert each.is_refused or each.trace.arrival < each.first_token <= each.ended
    refused = sum(each.is_refused for each in requests)
    assert 0 < refused < len(requests)
    for worker in cluster.workers.values():
        load_ = worker.known.load
        counts = load_.requests, load_.rows, load_.prompts, load_.prefill_tokens, load_.context_tokens
        assert counts == (0, 0, 0, 0, 0)
        assert worker.engine.usage == pytest.approx(0)


def test_the_same_trace_gives_the_same_times():
    one, again = load(2), load(2)
    for requests in (one, again):
        run(layout(2, 2), requests, profile(kv_tokens=3000))
    assert [each.ended for each in one] == [each.ended for each in again]


def test_the_routers_policy_is_asked(monkeypatch):
    """Round robin follows the router's own rule."""
    requests = [request(float(number), 10, 2) for number in range(6)]
    where = layout(0, 3, "round_robin")
    asked = []
    place = type(where.policy).place

    def spy(self, facts, cluster, state):
        answer = place(self, facts, cluster, state)
        asked.append(answer[0].workers["decode"])
        return answer

    monkeypatch.setattr(type(where.policy), "place", spy)
    run(where, requests)
    assert asked == ["decode-0", "decode-1", "decode-2"] * 2


def test_a_split_request_is_decoded_once_its_blocks_have_arrived():
    """Two chunks take 410 ms each. The blocks of each take 0.4 s to move. Nine steps follow."""
    [one] = requests = [request(0.0, 800, 10)]
    slow = LinkProfile(latency_s=0.0, bytes_per_s=1e7)
    run(layout(1, 1, "least_loaded"), requests, profile(kv_bytes=10_000, link=slow))
    assert one.was_split
    assert one.first_token == pytest.approx(0.82)
    assert one.ended == pytest.approx(0.82 + 0.4 + 9 * 0.011)


@pytest.mark.parametrize(("beside", "longer_s"), [(1.0, 0.0), (1.5, 0.41 / 3), (2.0, 0.41 / 2)])
def test_decoding_takes_longer_while_another_worker_works(beside: float, longer_s: float):
    """A prompt of 0.41 s arrives while a request decodes."""

    def ended(**changes: Any) -> float:
        requests = [request(0.0, 10, 100), request(0.3, 400, 1)]
        run(layout(1, 1, "least_loaded"), requests, profile(**changes))
        return requests[0].ended

    assert ended(decode_beside=beside) - ended() == pytest.approx(longer_s, abs=0.02)


def test_prompts_take_longer_while_another_worker_decodes():
    def first_token(at: float) -> float:
        requests = [request(0.0, 10, 100), request(at, 400, 1)]
        run(layout(1, 1, "least_loaded"), requests, profile(prefill_beside=1.5))
        return requests[1].ttft_s

    assert first_token(5.0) == pytest.approx(0.41), "alone"
    assert first_token(0.3) == pytest.approx(0.61)


def test_a_hand_off_has_a_fixed_time_beyond_the_wire():
    requests = [request(0.0, 10, 2)]
    run(layout(1, 1, "least_loaded"), requests, profile(handoff_s=0.25))
    assert requests[0].ended - requests[0].first_token == pytest.approx(0.25 + 0.011)


def test_blocks_cached_by_the_decode_worker_do_not_move():
    slow = LinkProfile(latency_s=0.0, bytes_per_s=1e6)
    requests = [request(0.0, 400, 2, prompt=1), request(60.0, 400, 2, prompt=1)]
    run(layout(1, 1, "least_loaded"), requests, profile(kv_bytes=10_000, link=slow))
    first, second = (each.ended - each.first_token for each in requests)
    assert first == pytest.approx(4.0 + 0.011)
    assert second == pytest.approx(0.011)


def test_a_prefix_is_fetched_if_that_is_faster_than_computing_it():
    """The holder decodes so much that the other worker is the better choice."""
    fast = LinkProfile(latency_s=0.001, bytes_per_s=1e10)
    busy = [request(2.0, 1000, 400, prompt=1) for _ in range(20)]
    late = request(3.0, 1000, 400, prompt=1)
    run(layout(0, 2), [request(0.0, 1000, 2, prompt=1), *busy, late], profile(kv_bytes=1000, link=fast))
    holders = {each.workers["decode"] for each in [*busy, late]}
    assert holders == {"decode-0", "decode-1"}
    assert all(each.ttft_s < 0.5 for each in [*busy, late]), "to compute it would take a second"


def test_late_requests_are_refused_by_the_slo():
    requests = [request(0.0, 1000, 2) for _ in range(5)]
    run(layout(0, 1, slo_ttft_s=2.5), requests)
    assert [each.is_refused for each in requests] == [False, False, True, True, True]


def test_equal_blocks_have_equal_tokens():
    """A partial block has an id, too. Tokens after the last id belong to the request alone."""
    traces = [TraceRequest(0.0, length, 1, [1, 2, 3]) for length in (250, 350, 350)]
    requests = [SimulatedRequest(trace, BLOCK, number) for number, trace in enumerate(traces)]
    first, second, third = (each.engine_request().prompt_token_ids for each in requests)
    assert first == second[:250] and second[:300] == third[:300]
    assert len(set(first)) == 3 and set(second[300:]).isdisjoint(third)
