"""Simulated workers with sliding windows: what fits, what is found in the cache, what moves."""

from __future__ import annotations

import pytest

from planner.profile import LinkProfile
from planner.scenarios import Slo, Study
from planner.trace import TraceRequest
from protocol.errors import ConfigError
from tests.planner.planned import layout, profile, request, run

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
    """The wire takes a second per 1000 tokens: 300 for full layers, or a quarter of 300 and three quarters of
    100.
    """
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


@pytest.mark.parametrize(("windows", "found"), [((0,), 2), (MIXED, 2), ((100,), 3)], ids=str)
def test_cached_prompts_need_room_in_full_layers_alone(windows: tuple[int, ...], found: int) -> None:
    """Five prompts of 1000 tokens come one after the other, then again from the latest on. The pool has room
    for 2300 tokens, of which a running prompt needs 480.
    """
    order = [1, 2, 3, 4, 5, 5, 4, 3, 2]
    requests = [request(10.0 * place, 1000, 1, prompt) for place, prompt in enumerate(order)]
    run(layout(0, 1), requests, profile(kv_tokens=2300, chunk_tokens=100, kv_windows=windows))
    assert sum(each.ttft_s < 0.5 for each in requests[5:]) >= found
