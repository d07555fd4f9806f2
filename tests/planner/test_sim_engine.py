"""A simulated worker compared with times computed by hand."""

from __future__ import annotations

import pytest

from planner.profile import LinkProfile
from planner.scenarios import Slo, Study
from planner.trace import TraceRequest
from protocol.errors import ConfigError
from tests.planner.planned import layout, profile, request, run

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
