"""A draft worker serves two decode workers in separate processes: killed, restarted and drained."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from bench.shapes.tokenizer import save_tokenizer
from protocol.speculation import SpeculativeConfig
from tests.e2e.serving import HttpServing
from tests.speculation.small_engine import write_pair
from tests.worker.tiny_model import VOCAB_SIZE

SLOW = "slow:0.02"
"""Slows decoding, so that drafts arrive in time on a busy machine too."""
WORKERS = {"decode-0": SLOW, "decode-1": SLOW, "draft-0": ""}
NUM_TOKENS = 150
"""Long enough that requests still run when a worker fails."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServing]:
    target, draft = tmp_path_factory.mktemp("pair") / "model", tmp_path_factory.mktemp("draft")
    target.mkdir()
    write_pair(target, draft)
    for folder in (target, draft):
        save_tokenizer(folder, VOCAB_SIZE, 1024)
    speculative = SpeculativeConfig(method="draft_model", model=str(draft), num_speculative_tokens=3)
    options: dict[str, Any] = {
        "disaggregation": False,
        "decode_replicas": 2,
        "draft_replicas": 1,
        "worker_timeout": 2.0,
    }
    options |= {"speculative_config": speculative, "draft_placement": "remote"}
    with HttpServing(target, WORKERS, **options) as serving:
        yield serving


def ask(serving: HttpServing, number: int, drafts: bool = True) -> list[int]:
    fields = {"temperature": 0.8 * (number % 2), "seed": number, "speculative": {"enabled": drafts}}
    return serving.tokens([5 + number, 6, 7, 8], NUM_TOKENS, **fields)


@pytest.fixture(scope="module")
def plain(serving: HttpServing) -> list[list[int]]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda number: ask(serving, number, drafts=False), range(4)))


def start(serving: HttpServing, pool: ThreadPoolExecutor) -> list[Future[list[int]]]:
    """Start requests and return when each has had drafts of the draft worker."""
    before = accepted(serving)
    futures = [pool.submit(ask, serving, number) for number in range(4)]
    serving.wait(lambda: accepted(serving) > before)
    return futures


def accepted(serving: HttpServing) -> float:
    """Return the accepted tokens at all decode workers. Waits for one that is silent for a moment."""
    name = 'spec_decode_num_accepted_tokens_total{method="remote"}'
    workers = serving.http.get("/workers").json()["workers"]
    return sum(worker["counters"].get(name, 0.0) for worker in workers if worker["role"] == "decode")


def test_both_decode_workers_use_its_drafts(serving: HttpServing, plain: list[list[int]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert [each.result() for each in start(serving, pool)] == plain
    name = 'spec_decode_num_accepted_tokens_total{method="remote"}'
    serving.wait(lambda: serving.worker_states()["draft-0"]["counters"]["draft_requests_open"] == 0)
    for worker in ("decode-0", "decode-1"):
        assert serving.worker_states()[worker]["counters"][name] > 0
    assert serving.counter("draft-0", "drafted_tokens_total") > 0
    serving.wait_empty()


def test_a_killed_draft_worker_is_replaced(serving: HttpServing, plain: list[list[int]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = start(serving, pool)
        serving.workers["draft-0"].process.kill()
        assert not all(each.done() for each in running)
        serving.bury("draft-0")
        assert [each.result() for each in running] == plain
        assert [ask(serving, number) for number in range(2)] == plain[:2]
        serving.add("draft-0")
        assert [each.result() for each in start(serving, pool)] == plain
    serving.wait_empty()


def test_a_killed_decode_worker_leaves_nothing_at_the_draft_worker(
    serving: HttpServing, plain: list[list[int]]
) -> None:
    def draft_counter(name: str) -> float:
        return serving.counter("draft-0", f"draft_requests_{name}")

    with ThreadPoolExecutor(4) as pool:
        running = start(serving, pool)
        serving.workers["decode-0"].process.kill()
        serving.bury("decode-0")
        assert [each.result() for each in running] == plain
    serving.wait(lambda: draft_counter("open") == 0)
    assert draft_counter("expired_total") == 0
    assert draft_counter("orphaned_total") > 0
    serving.add("decode-0", SLOW)
    serving.wait_empty()


def test_a_draft_worker_cannot_take_another_role(serving: HttpServing) -> None:
    answer = serving.http.post("/workers/draft-0/role", json={"role": "decode"})
    assert answer.status_code == 409
    assert "another model" in answer.json()["error"]["message"]
    answer = serving.http.post("/workers/decode-0/role", json={"role": "draft"})
    assert answer.status_code == 409


def test_a_draft_worker_is_drained(serving: HttpServing, plain: list[list[int]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = start(serving, pool)
        answer = serving.http.post("/workers/draft-0/drain")
        assert answer.status_code == 200, answer.text
        assert [each.result() for each in running] == plain
        assert [ask(serving, 0)] == plain[:1]
    serving.wait(lambda: not serving.workers["draft-0"].process.is_alive())
