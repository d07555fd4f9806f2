"""`/decisions` and `/cluster` show placements, their predicted costs and the outcomes."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.worker_to_router import PairState
from tests.router.router_clients import eventually, lose, make_pair, post


@pytest.fixture
def router(make_router):
    return make_router(placement="cost")


def decisions(router, **params) -> list[dict]:
    answer = router.http.get("/decisions", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()["decisions"]


def test_a_decision_shows_its_predicted_costs_and_outcome(router):
    make_pair(router)
    for count in (1, 5):
        assert post(router, max_tokens=count).status_code == 200
    newest, oldest = decisions(router)
    assert decisions(router, limit=1) == [newest]
    predicted = newest["chosen"]["predicted"]
    parts = predicted["parts"]
    assert predicted["cost_s"] == pytest.approx(sum(parts.values()))
    assert predicted["ttft_s"] == pytest.approx(parts["queue_s"] + parts["fetch_s"] + parts["prefill_s"])
    workers = [newest["chosen"]["workers"], *(each["workers"] for each in newest["alternatives"])]
    assert sorted(map(str, workers)) == [
        "{'decode': 'decode-0'}",
        "{'decode': 'prefill-0'}",
        "{'prefill': 'prefill-0', 'decode': 'decode-0'}",
    ]
    assert 0 < newest["observed"]["ttft_s"] < 5 and 0 < newest["observed"]["tpot_s"] < 5
    assert oldest["observed"]["tpot_s"] is None, "it had one token"
    for quantity, number in (("ttft", 2), ("tpot", 1)):
        values = [decision["observed"][f"{quantity}_s"] for decision in (newest, oldest)][:number]
        name = "tandem_placement_observed_seconds_total"
        assert router.metric(name, quantity=quantity) == pytest.approx(sum(values))
        error = router.metric("tandem_placement_error_seconds_total", quantity=quantity)
        foreseen = router.metric("tandem_placement_predicted_seconds_total", quantity=quantity)
        assert foreseen > 0 and error >= abs(foreseen - sum(values)) - 1e-9


@pytest.mark.parametrize("split", [True, False, None])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_request_chooses_whether_it_is_split(router, path, split):
    make_pair(router)
    said: dict[str, Any] = {"input": "x"} if path == "/v1/responses" else {"prompt": "x"}
    said = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else said
    assert router.http.post(path, json={**said, "disaggregate": split}).status_code == 200
    (decision,) = decisions(router)
    assert decision["asked_to_split"] is split
    assert ("prefill" in decision["chosen"]["workers"]) == bool(split)


def test_a_split_is_refused_without_disaggregation(make_router):
    router = make_router(disaggregation=False)
    router.add_worker()
    answer = post(router, disaggregate=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "disaggregate")
    assert "--no-disaggregation" in answer.json()["error"]["message"]
    assert post(router, disaggregate=False).status_code == 200


def test_the_cluster_shows_load_costs_and_links(router, pool):
    pairs = [
        PairState(peer="decode-0", transport="shm", in_use=True, latency_s=1e-4, bytes_per_s=1e9),
        PairState(peer="decode-0", transport="tcp"),
    ]
    worker = router.add_worker("decode-0", pairs=pairs)
    worker.hold.set()
    future = pool.submit(post, router, max_tokens=2)
    eventually(lambda: worker.generated)
    shown = router.http.get("/cluster").json()
    expected = {"prefill": "cost", "decode": "cost", "disaggregation": True, "drafts": "cost"}
    assert shown["placement"] == expected
    (found,) = shown["workers"]
    assert (found["id"], found["ready"], found["kv"]["tokens"]) == ("decode-0", True, 1600)
    assert (found["load"]["requests"], found["load"]["rows"], found["load"]["prompts"]) == (1, 1, 1)
    assert found["costs"]["step_s"] > 0
    link = {"from": "decode-0", "to": "decode-0", "transport": "shm", "latency_s": 1e-4, "bytes_per_s": 1e9}
    assert shown["links"] == [link]
    worker.hold.clear()
    assert shown["awaited"] == []
    assert future.result(20).status_code == 200
    load = router.http.get("/cluster").json()["workers"][0]["load"]
    assert (load["rows"], load["context_tokens"], load["prompts"], load["prefill_tokens"]) == (0, 0, 0, 0)


def test_the_cluster_shows_kept_states(router):
    """Only workers whose model has recurrent layers keep states."""
    counters = {
        "kept_states": 3,
        "kept_state_bytes": 4096,
        "kept_state_hits_total": 7,
        "kept_states_saved_total": 9,
        "kept_states_evicted_total": 6,
    }
    router.add_worker("decode-0", counters=counters)
    router.add_worker("decode-1")
    shown = {worker["id"]: worker["states"] for worker in router.http.get("/cluster").json()["workers"]}
    assert shown == {"decode-0": {"count": 3, "bytes": 4096, "hits": 7, "evictions": 6}, "decode-1": None}
    labels = {"worker": "decode-0", "role": "decode"}
    assert router.metric("tandem_kept_state_hits_total", **labels) == 7
    assert router.metric("tandem_kept_states", **labels) == 3


def test_requests_under_way_show_their_stage_and_workers(router, pool):
    """One request is in each stage: it waits, its prompt is computed, handed over, and decoded."""
    router.server.expect({"prefill-0": "prefill", "decode-0": "decode"})
    prefill, decode = make_pair(router, rejected_per_step=2, tokens_per_step=3)
    future = pool.submit(post, router, max_tokens=40)
    assert future.result(20).status_code == 200
    lose(router, decode)
    lose(router, prefill)
    future = pool.submit(post, router, max_tokens=40)

    def in_stage(stage: str) -> Any:
        shown = router.http.get("/requests").json()
        assert sum(shown["stages"].values()) == len(shown["requests"]) <= 1
        return shown["requests"][0] if shown["stages"][stage] else None

    eventually(lambda: in_stage("queue"))
    found = in_stage("queue")
    assert (found["workers"], found["tokens"], found["prompt_tokens"]) == ({}, 0, 4)
    assert 0 < found["seconds"] < 5
    assert router.http.get("/cluster").json()["awaited"] == ["prefill-0", "decode-0"]
    decode = router.add_worker("decode-0", stall_after=0)
    eventually(lambda: in_stage("prefill"))
    assert in_stage("prefill")["workers"] == {"decode": "decode-0"}
    assert router.http.get("/cluster").json()["awaited"] == ["prefill-0"]
    decode.stall_after = 10
    eventually(lambda: in_stage("decode"))
    eventually(lambda: in_stage("decode")["tokens"] >= 10)
    decode.stall_after = 1000
    assert future.result(20).status_code == 200
    assert router.http.get("/requests").json() == {
        "stages": {"queue": 0, "prefill": 0, "transfer": 0, "decode": 0},
        "requests": [],
    }


def test_a_request_that_is_handed_over_is_in_transfer(make_router, pool):
    router = make_router()
    prefill, _ = make_pair(router)
    prefill.keep.set()
    future = pool.submit(post, router, max_tokens=5)
    eventually(lambda: router.http.get("/requests").json()["stages"]["transfer"])
    (found,) = router.http.get("/requests").json()["requests"]
    assert (found["workers"], found["tokens"]) == ({"prefill": "prefill-0", "decode": "decode-0"}, 1)
    (held,) = prefill.held
    prefill.fail_handover(held, "overloaded")
    assert future.result(20).status_code == 200


def test_a_session_header_names_the_worker(router):
    workers = [router.add_worker(f"decode-{index}") for index in range(3)]
    body = {"prompt": "the quick brown fox", "max_tokens": 1}
    for _ in range(6):
        headers = {"x-session-id": "a conversation"}
        assert router.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert sorted(len(worker.generated) for worker in workers) == [0, 0, 6]
    long = router.http.post("/v1/completions", json=body, headers={"x-session-id": "x" * 257})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "x-session-id")
