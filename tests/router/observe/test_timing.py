"""Records of requests: the timing of each, and a log line with the ids that clients and workers use."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from protocol.outputs import RequestTiming, TransferTiming
from protocol.sampling import SamplingParams
from router.observe.timing import stages
from router.requests.journal import Generation
from router.text.choice import Choice, Prompt
from tests.router.router_clients import BODY, emitted, events_of, eventually, is_idle, lose, make_pair, post

STAGES = (
    *("queue_s", "placement_s", "earlier_s", "worker_queue_s", "prefill_s"),
    *("takeover_s", "decode_s"),
)


def total_of_stages(timing: dict) -> float:
    return timing["prepare_s"] + sum(timing["choices"][0][stage] for stage in STAGES)


def timing_of(response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()["timing"]


def test_a_split_request(router, pool):
    decode = router.workers[0]
    decode.hold.set()
    answer = pool.submit(post, router, max_tokens=20, return_timing=True)
    eventually(lambda: any(emitted(router)))
    decode.hold.clear()  # else its first output may overtake the first token
    timing = timing_of(answer.result())
    (choice,) = timing["choices"]
    assert (choice["mode"], choice["workers"]) == ("split", {"prefill": "prefill-0", "decode": "decode-0"})
    assert (choice["worker_queue_s"], choice["prefill_s"]) == (0.001, 0.002)
    assert (choice["tokens"], choice["decode_steps"], choice["drafted_tokens"]) == (20, 19, 0)
    assert (choice["placed_again"], choice["migrated"], choice["redirected"]) == (0, 0, 0)
    assert (choice["queue_s"], choice["earlier_s"]) == (0, 0)
    assert 0 < timing["prepare_s"] < 1 and 0 < choice["placement_s"] < 1
    assert choice["takeover_s"] > 0 and choice["decode_s"] > 0
    after_first = choice["total_s"] - choice["ttft_s"]
    assert choice["takeover_s"] + choice["decode_s"] == pytest.approx(after_first)
    assert timing["prepare_s"] + choice["placement_s"] < choice["ttft_s"] < choice["total_s"]
    assert timing["total_s"] == choice["total_s"]


def test_only_requests_that_ask_get_a_record(router):
    assert "timing" not in post(router, max_tokens=2).json()
    assert "timing" not in post(router, max_tokens=2, return_timing=False).json()
    for path, body in (
        ("/v1/completions", BODY),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        asked = {**body, "max_tokens": 3}
        answer = router.http.post(path, json=asked, headers={"x-return-timing": "True"})
        assert timing_of(answer)["choices"][0]["tokens"] == 3
        answer = router.http.post(path, json=asked, headers={"x-return-timing": "false"})
        assert answer.status_code == 200 and "timing" not in answer.json()
        answer = router.http.post(path, json=asked, headers={"x-return-timing": "1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-return-timing")


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_streams_last_event_has_the_record(router, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    *events, last = events_of(router, max_tokens=5, n=2, return_timing=True, **options)
    assert last["choices"] == [] and ("usage" in last) == with_usage
    assert [choice["index"] for choice in last["timing"]["choices"]] == [0, 1]
    assert [choice["tokens"] for choice in last["timing"]["choices"]] == [5, 5]
    assert all("timing" not in event for event in events)
    assert last["timing"]["total_s"] == max(choice["total_s"] for choice in last["timing"]["choices"])


def test_a_whole_request_that_drafts(make_router):
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=2)
    timing = timing_of(post(router, max_tokens=20, return_timing=True))
    (choice,) = timing["choices"]
    assert (choice["mode"], choice["workers"]) == ("whole", {"decode": "decode-0"})
    assert (choice["decode_steps"], choice["drafted_tokens"], choice["accepted_tokens"]) == (4, 25, 15)
    assert (choice["takeover_s"], choice["transfer"]) == (0, None)
    assert choice["ttft_s"] + choice["decode_s"] == pytest.approx(choice["total_s"])


@pytest.mark.parametrize("stop", [None, "hunter"])
def test_spans_show_which_text_was_drafted(make_router, stop):
    """The first three of each step's four tokens were drafted."""
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=2)
    prompt = "the quick brown fox jumps over the lazy dog and runs away from the hunter. naïve 🙂"
    fields = {"prompt": prompt, "max_tokens": 90, "stop": stop, "return_timing": True}
    (choice,) = post(router, **fields, return_token_ids=True).json()["choices"]
    spans, texts = choice["spans"], []
    for index, token_id in enumerate(choice["token_ids"]):
        text = router.http.post("/detokenize", json={"tokens": [token_id]}).json()["prompt"]
        texts.append((text, index % 4 < 3))
    assert "".join(span["text"] for span in spans) == choice["text"]
    assert all(span["text"] for span in spans)
    assert all(one["drafted"] != other["drafted"] for one, other in itertools.pairwise(spans))
    if stop is None:
        whole = choice["text"].index("naïve")  # from here on, characters consist of several tokens
        expected = [drafted for text, drafted in texts for _ in text][:whole]
        assert [span["drafted"] for span in spans for _ in span["text"]][:whole] == expected
    events = events_of(router, **fields)
    streamed = [span for event in events for each in event["choices"] for span in each["spans"]]
    for drafted in (True, False):
        text = "".join(span["text"] for span in streamed if span["drafted"] == drafted)
        assert text == "".join(span["text"] for span in spans if span["drafted"] == drafted)
    assert "spans" not in post(router, max_tokens=2).json()["choices"][0]


def test_a_chat_has_spans_too(make_router):
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=0)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "return_timing": True}
    (choice,) = router.http.post("/v1/chat/completions", json=body).json()["choices"]
    assert "".join(span["text"] for span in choice["spans"]) == choice["message"]["content"]
    assert {span["drafted"] for span in choice["spans"]} == {True, False}


def test_a_request_that_lost_its_worker_and_was_parked(make_router, pool):
    router = make_router()
    router.server.expect({"prefill-0": "prefill", "decode-0": "decode"})
    prefill, decode = make_pair(router)
    decode.stall_after = 7
    running = pool.submit(post, router, max_tokens=20, return_timing=True)
    eventually(lambda: emitted(router) == [7])
    lose(router, prefill)
    lose(router, decode)
    eventually(lambda: router.metric("tandem_num_requests_parked") == 1)
    router.add_worker("decode-1")
    timing = timing_of(running.result(20))
    (choice,) = timing["choices"]
    assert (choice["placed_again"], choice["migrated"], choice["tokens"]) == (1, 0, 20)
    assert (choice["mode"], choice["workers"]) == ("whole", {"decode": "decode-1"})
    assert choice["earlier_s"] > 0.005 and choice["queue_s"] > 0
    assert choice["ttft_s"] < timing["prepare_s"] + choice["placement_s"] + choice["earlier_s"]
    assert 0.5 * choice["total_s"] < total_of_stages(timing) < choice["total_s"] + 0.015
    eventually(lambda: is_idle(router))


def test_workers_measurements_are_placed_between_their_tokens():
    """The first token came at 10 s, the decode worker's first at 13 s, the last at 20 s."""
    detokenizer: Any = None
    choice = Choice(0, Prompt([1, 2, 3]), detokenizer)
    generation = Generation([(choice, SamplingParams(max_tokens=9))], arrival=1.0, timeout_s=60)
    (request,) = generation.requests
    times, generation.started = request.times, 2.0
    times.earlier_s, times.queue_s, times.placement_s, times.placed_at = 0.5, 1.0, 0.25, 5.0
    times.answered_at, times.taken_over_at, request.last_token_time = 10.0, 13.0, 20.0
    request.timing = RequestTiming(
        queue_s=1.0,
        prefill_s=3.0,
        decode_queue_s=0.5,
        transfer=TransferTiming(transport="tcp", transfer_s=2.5, exposed_s=0.5, handoff_s=1.0),
    )
    found = {stage.name: (stage.began, stage.ended) for stage in stages(generation)}
    assert found == {
        "prepare": (1.0, 2.0),
        "earlier": (2.0, 2.5),
        "queue": (3.75, 4.75),
        "placement": (4.75, 5.0),
        "worker_queue": (6.0, 7.0),
        "prefill": (7.0, 10.0),
        "transfer": (8.0, 10.5),
        "decode_queue": (11.0, 11.5),
        "decode": (11.5, 20.0),
    }
    (transfer,) = (stage for stage in stages(generation) if stage.name == "transfer")
    assert transfer.attributes["tandem.transfer.transport"] == "tcp"


def of_requests(caplog: pytest.LogCaptureFixture, logger: str = "router.observe.timing") -> list[Any]:
    return [record for record in caplog.records if record.name == logger]


def test_a_request_that_finishes(make_router, caplog):
    router = make_router(enable_log_requests=True)
    router.add_worker()
    with caplog.at_level("INFO"):
        answer = post(router, max_tokens=7, n=2)
        eventually(lambda: is_idle(router))
    first, second = of_requests(caplog)
    assert first.request_id != second.request_id
    for record in (first, second):
        assert record.http_request_id == answer.headers["x-request-id"]
        assert record.finish_reason == "length" and record.timing["tokens"] == 7
        assert record.request_id in record.getMessage() and record.http_request_id in record.getMessage()


def test_a_request_that_fails(make_router, caplog):
    router = make_router(enable_log_requests=True, request_timeout=1.5)
    router.add_worker().stall_after = 2
    with caplog.at_level("INFO"):
        assert post(router, max_tokens=7).status_code == 504
    (record,) = of_requests(caplog)
    assert (record.status, record.code, record.tokens) == (504, "timeout", 2)
    assert "took longer than 1.5 s" in record.getMessage()


def test_nothing_is_logged_by_default(make_router, caplog):
    router = make_router()
    router.add_worker()
    with caplog.at_level("INFO"):
        post(router)
    assert of_requests(caplog) == []


def test_a_request_that_is_placed_again_has_new_and_old_ids(make_router, caplog, pool):
    router = make_router(enable_log_requests=True)
    first = router.add_worker("decode-0", cached_tokens=5)
    first.stall_after = 2
    with caplog.at_level("INFO"):
        future = pool.submit(post, router)
        eventually(lambda: emitted(router) == [2])
        router.add_worker("decode-1")
        lose(router, first)
        answer = future.result(20)
    (moved,) = of_requests(caplog, "router.dispatch.dispatcher")
    (ended,) = of_requests(caplog)
    assert moved.http_request_id == ended.http_request_id == answer.headers["x-request-id"]
    assert moved.request_id == ended.request_id != ""
