"""A client's choices about speculation, and its reports: requests, usage, metrics."""

from __future__ import annotations

import pytest

from protocol.outputs import TokenOutput
from protocol.speculation import RequestSpeculation, SpeculativeConfig
from tests.router.router_clients import emitted, events_of, eventually, lose, openai_client, post, said

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ZERO = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def details(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def seen(worker) -> list[RequestSpeculation | None]:
    return [request.speculation for request in worker.generated]


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x", "max_tokens": 4}), ("/v1/chat/completions", CHAT)]
)
def test_the_engine_gets_the_requests_options(make_router, path, body):
    router = make_router(speculative_config=SpeculativeConfig(method="draft_model", model="m"))
    worker = router.add_worker()

    def ask(**fields) -> None:
        assert router.http.post(path, json={**body, **fields}).status_code == 200

    ask()
    ask(speculative=None)
    ask(speculative={"enabled": False})
    ask(speculative={"method": "draft_model", "num_speculative_tokens": 7}, n=2)
    ask(speculative={"method": "suffix"})
    assert seen(worker) == [
        None,
        None,
        RequestSpeculation(enabled=False),
        *[RequestSpeculation(method="draft_model", num_speculative_tokens=7)] * 2,
        RequestSpeculation(method="suffix"),
    ]


def test_a_prediction_goes_to_the_engine(make_router):
    router = make_router()
    worker = router.add_worker()
    wishes = (None, {"enabled": False}, {"num_speculative_tokens": 3}, {"method": "ngram"})
    for content in ("the fox", [{"type": "text", "text": "the fox"}], "the fox" + " and more" * 2000):
        for wish in wishes:
            fields = {"prediction": {"type": "content", "content": content}, "speculative": wish}
            answer = router.http.post("/v1/chat/completions", json={**CHAT, **fields})
            too_long = len(content) > 100
            assert answer.status_code == (400 if too_long else 200), answer.text
            assert not too_long or answer.json()["error"]["param"] == "prediction.content"
    tokens = router.server.state.tokenizer.encode("the fox", add_special_tokens=False)
    assert [request.prediction for request in worker.generated] == [tokens] * 2 * len(wishes)
    suffix = RequestSpeculation(method="suffix")
    own = [RequestSpeculation(enabled=False, method="suffix"), RequestSpeculation(method="ngram")]
    own.insert(1, RequestSpeculation(num_speculative_tokens=3, method="suffix"))
    assert seen(worker) == [suffix, *own] * 2


@pytest.mark.parametrize(
    ("asked", "field", "reason"),
    [
        ({"num_speculative_tokens": 33}, ".num_speculative_tokens", "an integer from 0 to 32, got 33"),
        ({"method": "magic"}, ".method", "'ngram', 'self_speculative', 'suffix', got 'magic'"),
        ({"method": "medusa"}, ".method", "'medusa' needs weights that this server has not loaded"),
        ({"enabled": True}, ".method", "this server has no method of its own (--speculative-config)"),
        ("ngram", "", "expected object | null, got str"),
    ],
)
def test_bad_options_are_named(router, asked, field, reason):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        answer = router.http.post(path, json={**body, "speculative": asked})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == f"speculative{field}"
        assert reason in error["message"]


def test_options_stay_with_a_request_that_is_placed_again(make_router, pool):
    router = make_router(speculative_config=SpeculativeConfig(method="ngram"))
    first = router.add_worker("decode-0", tokens_per_step=3, rejected_per_step=2)
    first.stall_after = 6
    future = pool.submit(post, router, max_tokens=12, speculative={"num_speculative_tokens": 5})
    eventually(lambda: emitted(router) == [6])
    second = router.add_worker("decode-1", tokens_per_step=2, rejected_per_step=1)
    lose(router, first)
    usage = future.result(20).json()["usage"]
    assert seen(second) == [RequestSpeculation(num_speculative_tokens=5)]
    assert usage["completion_tokens"] == 12
    assert usage["completion_tokens_details"] == details(2 * 2 + 3 * 1, 2 * 2 + 3 * 1)


# --- usage ----------------------------------------------------------------------------------------


def test_usage_has_accepted_and_rejected_predictions(make_router):
    """Each step has four tokens: three were drafted, and two more drafts were rejected."""
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=2)
    whole = post(router, max_tokens=12, n=2).json()
    assert whole["usage"]["completion_tokens_details"] == details(2 * 3 * 3, 2 * 3 * 2)
    chunks = events_of(router, max_tokens=12, n=2, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens_details"] == details(2 * 3 * 3, 2 * 3 * 2)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    texts = {0: "", 1: ""}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]


def test_the_openai_client_reads_it_from_a_chat(make_router):
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=1)
    with openai_client(router.url) as client:
        usage = client.chat.completions.create(model="test-model", **CHAT).usage
    assert usage.completion_tokens_details.accepted_prediction_tokens == 3
    assert usage.completion_tokens_details.rejected_prediction_tokens == 1


def test_continuous_usage_counts_along(make_router):
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=1, step_s=0.02)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(router, max_tokens=12, stream_options=options)
    counts = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    assert counts == sorted(counts, key=lambda count: count["accepted_prediction_tokens"])
    assert counts[0]["accepted_prediction_tokens"] < counts[-1]["accepted_prediction_tokens"] == 9


def test_other_drafts_are_not_counted(make_router):
    """In each step the first two of five drafted tokens come from the prediction, and three are accepted."""
    router = make_router()
    router.add_worker(tokens_per_step=4, rejected_per_step=2, not_predicted=3)
    assert post(router, max_tokens=12).json()["usage"]["completion_tokens_details"] == details(2 * 3, 0)


def test_without_speculation_counts_are_zero(router):
    assert post(router, max_tokens=5).json()["usage"]["completion_tokens_details"] == ZERO


def test_tokens_cut_by_a_stop_string_are_not_counted(make_router):
    """The stop string ends with the first of four tokens, so the accepted ones after it are no output."""
    router = make_router()
    tokenizer = router.server.state.tokenizer
    token_ids = tokenizer.encode("brown fox jumps over the dog")
    worker = router.add_worker(script=lambda _: token_ids * 3, tokens_per_step=4, rejected_per_step=1)
    second = tokenizer.decode(token_ids[4:5])
    assert second.strip() and second not in tokenizer.decode(token_ids[:4])
    answer = post(router, max_tokens=12, stop=second, return_token_ids=True, logprobs=1).json()
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == tokenizer.decode(token_ids[:4])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", second)
    assert choice["token_ids"] == token_ids[:5]
    assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"] == 5
    assert usage["completion_tokens_details"] == details(3 + 1, 1 + 3)
    assert router.metric("tandem_generation_tokens_total") == 5
    eventually(lambda: worker.aborted and not worker.jobs)


@pytest.mark.parametrize("counts", [{"accepted_tokens": 2}, {"predicted_tokens": 5}])
def test_a_worker_that_counts_wrongly_fails_the_request(make_router, pool, counts):
    router = make_router()
    worker = router.add_worker()
    worker.hold.set()
    future = pool.submit(post, router, max_tokens=5)
    eventually(lambda: worker.generated)
    wrong = {"drafted_tokens": 4, **counts}
    output = TokenOutput(request_id=worker.generated[0].request_id, token_ids=[7], **wrong)
    worker.post(said(worker, output))
    assert future.result(20).status_code == 500
    assert router.metric("tandem_messages_dropped_total", reason="malformed") == 1
