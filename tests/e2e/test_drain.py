"""Workers leave or change their role while requests run; clients see the same answers. fp32."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from models.bundled import BUNDLED_MODEL
from router.workers.kv_index import hash_blocks
from tests.e2e.architectures import prompt
from tests.e2e.serving import HttpServing
from tests.e2e.test_failover import REQUESTS, Answers, ask, pool
from tests.e2e.test_speculation import PROMPT, options

__all__ = ["pool"]
NUM_TOKENS = 100
SLOW = "slow:0.1"
"""Makes an answer of 100 tokens take 10 s, in which two more workers start even on a busy machine."""


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Return the answers of an undisturbed server."""
    with HttpServing(folder) as serving:
        answers = [ask(serving, request, max_tokens=NUM_TOKENS) for request in REQUESTS]
    return [answer | {"logprobs": pytest.approx(answer["logprobs"], abs=1e-4)} for answer in answers]


def ask_all(serving: HttpServing, pool: ThreadPoolExecutor) -> list[Future[dict[str, Any]]]:
    """Start all requests and return when they all decode: no prefill worker has any left."""
    answers = [pool.submit(ask, serving, request, max_tokens=NUM_TOKENS) for request in REQUESTS]
    serving.wait(lambda: serving.metric("tandem_time_to_first_token_seconds_count") == len(REQUESTS))
    serving.wait(
        lambda: (
            not any(
                worker["outstanding_requests"]
                for worker in serving.worker_states().values()
                if worker["role"] == "prefill"
            )
        )
    )
    return answers


def operate(serving: HttpServing, worker_id: str, what: str, **body: Any) -> dict[str, Any]:
    answer = serving.http.post(f"/workers/{worker_id}/{what}", json=body)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_running_requests_move_with_their_kv(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers, transport: str
) -> None:
    with HttpServing(folder, {"prefill-0": "", "decode-0": SLOW}, kv_transports=transport) as serving:
        answers = ask_all(serving, pool)
        serving.add("decode-1")
        report = operate(serving, "decode-0", "drain")
        assert report["moved"] == len(REQUESTS)
        assert report["placed_again"] == report["redirected"] == 0
        assert [answer.result(30) for answer in answers] == expected
        serving.wait(lambda: not serving.workers["decode-0"].process.is_alive())
        fetched = serving.counter("decode-1", "prefix_blocks_fetched_total")
        computed = serving.counter("decode-1", "computed_tokens_total")
        lengths = [request["length"] for request in REQUESTS]
        assert fetched >= sum(length // 16 for length in lengths)
        assert computed < sum(lengths), "prompts came by wire"
        check_nothing_is_left(serving)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drafts_continue_on_the_new_worker(method: str, pool: ThreadPoolExecutor) -> None:
    """The draft's KV moves along, so the new worker's drafter reads a few tokens and not the whole text."""
    body = {
        "model": BUNDLED_MODEL.name,
        "prompt": PROMPT,
        "max_tokens": 300,
        "temperature": 0,
        "ignore_eos": True,
        "return_timing": True,
    }
    with HttpServing(
        BUNDLED_MODEL, {"decode-0": "slow:0.05"}, disaggregation=False, **options(method)
    ) as serving:
        expected = serving.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        before = serving.metric("tandem_time_to_first_token_seconds_count")
        answer = pool.submit(serving.http.post, "/v1/completions", json=body)
        serving.wait(lambda: serving.metric("tandem_time_to_first_token_seconds_count") > before)
        serving.add("decode-1")
        assert operate(serving, "decode-0", "drain")["moved"] == 1
        found = answer.result(30).json()
        assert found["choices"][0]["text"] == expected
        timing = found["timing"]["choices"][0]
        assert (timing["migrated"], timing["placed_again"], timing["workers"]) == (
            1,
            0,
            {"decode": "decode-1"},
        )
        assert 0 < timing["earlier_s"] < timing["total_s"]
        accepted, drafted = (
            serving.counter("decode-1", f'spec_decode_num_{name}_tokens_total{{method="{method}"}}')
            for name in ("accepted", "draft")
        )
        assert accepted > 0.3 * drafted > 0


def test_a_worker_moves_its_requests_on_sigterm(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers
) -> None:
    with HttpServing(folder, {"prefill-0": "", "decode-0": SLOW}) as serving:
        answers = ask_all(serving, pool)
        serving.add("decode-1")
        leaving = serving.workers["decode-0"]
        leaving.signal(signal.SIGTERM)
        assert [answer.result(30) for answer in answers] == expected
        serving.wait(lambda: leaving.process.exitcode == -signal.SIGTERM)
        assert serving.metric("tandem_requests_migrated_total") == len(REQUESTS)
        check_nothing_is_left(serving)


@pytest.mark.parametrize("from_role", ["decode", "prefill"])
def test_a_worker_changes_its_role_and_serves_in_it(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers, from_role: str
) -> None:
    """Process, weights and pool stay, and so does the prefix cache."""
    to_role = "prefill" if from_role == "decode" else "decode"
    workers = {"prefill-0": "", "prefill-1": "", "decode-0": "slow:0.05"}
    with HttpServing(folder, workers) as serving:
        answers = ask_all(serving, pool)
        serving.add("decode-1")
        changed = f"{from_role}-0"
        before = serving.worker_states()[changed]
        operate(serving, changed, "role", role=to_role)
        serving.wait(lambda: serving.worker_states().get(changed, {}).get("role") == to_role)
        after = serving.worker_states()[changed]
        assert after["pid"] == before["pid"]
        assert after["incarnation"] != before["incarnation"]
        assert after["cached_blocks"] > 0
        serving.wait(lambda: changed in kept_prefix(serving))
        assert serving.metric("tandem_kv_event_gaps_total") == 0
        assert [answer.result(30) for answer in answers] == expected
        operate(serving, f"{to_role}-1", "drain")
        assert ask(serving, REQUESTS[1], max_tokens=NUM_TOKENS) == expected[1]
        check_nothing_is_left(serving)


def test_a_drained_decode_workers_prefills_are_redirected(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers
) -> None:
    workers = {"prefill-0": "slow:0.1", "decode-0": "", "decode-1": ""}
    with HttpServing(folder, workers) as serving:
        answers = [pool.submit(ask, serving, request, max_tokens=NUM_TOKENS) for request in REQUESTS]
        serving.wait(lambda: serving.metric("tandem_placements_total") == len(REQUESTS))
        report = operate(serving, "decode-0", "drain")
        assert report["redirected"] > 0
        assert [answer.result(30) for answer in answers] == expected
        check_nothing_is_left(serving)


def test_requests_that_cannot_move_finish_or_are_placed_again_at_the_deadline(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers
) -> None:
    """Without prefix caching no KV can be fetched."""
    workers = {"prefill-0": "", "decode-0": "slow:0.1"}
    with HttpServing(folder, workers, drain_timeout=1.0, enable_prefix_caching=False) as serving:
        answers = ask_all(serving, pool)
        serving.add("decode-1")
        drained = ThreadPoolExecutor(1).submit(operate, serving, "decode-0", "drain")
        serving.wait(lambda: serving.worker_states()["decode-0"]["lifecycle"] == "draining")
        assert ask(serving, REQUESTS[1], max_tokens=NUM_TOKENS) == expected[1]
        report = drained.result(30)
        assert (report["moved"], report["placed_again"]) == (0, len(REQUESTS)), "the new one went elsewhere"
        assert 1.0 < report["seconds"] < 9.0, "the answers take 10 s"
        assert [answer.result(30) for answer in answers] == expected
        check_nothing_is_left(serving)


def test_the_new_worker_dies_during_the_fetch(
    folder: Path, pool: ThreadPoolExecutor, expected: Answers
) -> None:
    """The old worker still runs the request, and a third worker takes it over."""
    workers = {"prefill-0": "", "decode-0": SLOW}
    # Round robin: measured costs on a busy machine might leave one of the new workers idle.
    with HttpServing(folder, workers, decode_placement="round_robin") as serving:
        answers = ask_all(serving, pool)
        serving.add("decode-1", "KILL:before:_on_prefetch:1")
        serving.add("decode-2")
        drained = ThreadPoolExecutor(1).submit(operate, serving, "decode-0", "drain")
        serving.bury("decode-1")
        assert drained.result(30)["moved"] > 0
        assert [answer.result(30) for answer in answers] == expected
        check_nothing_is_left(serving)


def kept_prefix(serving: HttpServing) -> set[str]:
    """Return the workers in whose prefix cache the router finds one of the prompts."""
    feed = serving.router.state.kv_feed
    (cache,) = feed.formats
    return set().union(
        *(
            feed.index.find(hash_blocks(cache.root(), prompt(request["length"]), cache.block_size).keys)
            for request in REQUESTS
        )
    )


def check_nothing_is_left(serving: HttpServing) -> None:
    serving.wait_empty()
    assert serving.metric("tandem_request_failures_total") == 0
