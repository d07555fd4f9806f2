"""Requests continue where a dead worker stopped; failed hand-offs go elsewhere without another prefill."""

from __future__ import annotations

import pytest

from protocol.outputs import TokenOutput
from tests.router.router_clients import (
    answer,
    emitted,
    events_of,
    eventually,
    failure,
    is_idle,
    lose,
    make_pair,
    post,
    said,
)

pytestmark = pytest.mark.usefixtures("no_races")
PROMPT = "naïve 🙂 日本語 text 👩‍👩‍👧 and more"
NUM_TOKENS = 60


FIELDS = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "return_token_ids": True}


@pytest.fixture
def router(make_router):
    return make_router()


@pytest.fixture
def expected(undisturbed):
    return lambda **fields: undisturbed(**FIELDS | fields)


def stalled(router, pool, after: int, **fields):
    """Start a request on a worker that stops after some tokens, and a second worker that may continue."""
    first = router.add_worker("decode-0", stall_after=after)
    future = pool.submit(post, router, **FIELDS | fields)
    eventually(lambda: first.generated and emitted(router) == [after])
    second = router.add_worker("decode-1", cached_tokens=50 if after else 5)
    return future, first, second


def placed_again(router, reason: str = "worker_lost") -> float:
    return router.metric("tandem_requests_placed_again_total", reason=reason)


# --- placed again from the journal ---


@pytest.mark.parametrize("after", [0, 1, 5, 59])
def test_the_answer_is_the_same_wherever_its_worker_dies(router, pool, expected, after):
    """Tokens, text cut within characters, log-probabilities and usage."""
    future, first, second = stalled(router, pool, after, logprobs=2)
    lose(router, first)
    assert answer(future.result(20)) == expected(logprobs=2)
    assert second.generated[0].output_token_ids == first.script(first.generated[0])[:after]
    assert second.generated[0].request_id != first.generated[0].request_id
    assert second.generated[0].sampling == first.generated[0].sampling
    assert placed_again(router) == 1
    assert router.metric("tandem_generation_tokens_total") == NUM_TOKENS
    eventually(lambda: is_idle(router))


def test_a_stream_continues(router, expected):
    first = router.add_worker("decode-0", stall_after=7)

    def die() -> None:
        router.add_worker("decode-1")
        lose(router, first)

    options = {"include_usage": True}
    *chunks, last = events_of(router, on_first=die, stream_options=options, **FIELDS)
    whole = expected()
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert last["usage"] == whole["usage"]
    assert placed_again(router) == 1


def test_an_error_of_one_worker_is_retried_on_another(router, pool, expected):
    future, first, _ = stalled(router, pool, 7)
    first.stall_after = NUM_TOKENS
    first.post(said(first, failure(first.generated[0].request_id, "transfer")))
    assert answer(future.result(20)) == expected()
    assert placed_again(router, "transfer") == 1


def test_a_stop_string_across_the_seam(router, pool, expected):
    prompt = "numbers 0 1 2 3 4 5 6 7 8 9"
    whole = expected(prompt=prompt)["choices"][0]
    after = 6
    seam = len(router.server.state.tokenizer.decode(whole["token_ids"][:after]))
    stop = whole["text"][seam - 2 : seam + 2]
    future, first, _ = stalled(router, pool, after, prompt=prompt, stop=[stop])
    lose(router, first)
    choice = answer(future.result(20))["choices"][0]
    assert choice["text"] == whole["text"][: whole["text"].index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_prompt_logprobs_come_once(router, pool, expected):
    future, first, second = stalled(router, pool, 3, prompt_logprobs=1)
    lose(router, first)
    assert answer(future.result(20)) == expected(prompt_logprobs=1)
    assert first.generated[0].sampling.prompt_logprobs == 1
    assert second.generated[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("how", ["length", "eos", "stop token"])
def test_an_answer_that_is_already_complete_is_finished(router, pool, how):
    worker = router.add_worker()
    last = {"length": 9, "eos": worker.eos_token_id, "stop token": 7}[how]
    tokens = [8, 9, last]

    def never_finishing(job) -> TokenOutput:
        job.sent += 1
        place = job.sent - 1
        return TokenOutput(request_id=job.request.request_id, token_ids=[tokens[place]], position=place)

    worker._advance = never_finishing
    worker.stall_after = len(tokens)
    limit = len(tokens) if how == "length" else 10
    future = pool.submit(post, router, max_tokens=limit, stop_token_ids=[7], return_token_ids=True)
    eventually(lambda: emitted(router) == [len(tokens)])
    second = router.add_worker("decode-1")
    lose(router, worker)
    choice = answer(future.result(20))["choices"][0]
    assert choice["token_ids"] == tokens
    assert choice["finish_reason"] == ("length" if how == "length" else "stop")
    assert choice["stop_reason"] == (7 if how == "stop token" else None)
    assert not second.generated
    eventually(lambda: is_idle(router))


def test_each_of_several_sequences_continues(router, pool):
    first = router.add_worker("decode-0", stall_after=4)
    future = pool.submit(post, router, prompt=["one", "two two", "three three"], max_tokens=20, n=2)
    eventually(lambda: emitted(router) == [4] * 6)
    second = router.add_worker("decode-1")
    lose(router, first)
    body = answer(future.result(20))
    assert body["usage"]["completion_tokens"] == 120
    assert len(second.generated) == 6
    assert placed_again(router) == 6
    eventually(lambda: is_idle(router))


def test_the_third_death_without_a_token_is_an_error(router, pool):
    """The request itself may be the cause."""
    future, worker, other = stalled(router, pool, 3)
    for deaths in range(1, 5):
        other.stall_after = 3
        lose(router, worker)
        worker, other = other, router.add_worker(f"decode-{deaths + 1}")
        if deaths < 4:
            eventually(lambda dying=worker: dying.generated)
    response = future.result(20)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "worker_lost"
    assert not worker.generated
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize("every", [1, 2])
def test_a_request_that_progresses_survives_any_number_of_deaths(every, router, pool, expected):
    """A token comes before each death, or before every second one."""
    future, worker, other = stalled(router, pool, 3)
    for deaths in range(1, 9):
        count = other.stall_after = 3 + deaths // every
        lose(router, worker)
        worker, other = other, router.add_worker(f"decode-{deaths + 1}")
        eventually(lambda by=worker, count=count: by.generated and emitted(router) == [count])
    worker.stall_after = NUM_TOKENS
    assert answer(future.result(20)) == expected()
    assert placed_again(router) == 8


@pytest.mark.parametrize("is_stuck", [False, True], ids=["stopped", "stuck"])
def test_a_request_may_be_blamed_for_stuck_loops_and_not_for_stopped_workers(
    make_router, pool, expected, is_stuck
):
    """A stuck worker still sends heartbeats, and the request would go from one worker to the next."""
    router = make_router(worker_timeout=10.0)
    future, worker, other = stalled(router, pool, 3)
    for number in range(1, 5 if is_stuck else 6):  # the first worker has sent tokens
        other.stall_after = 3
        state = router.server.state.registry.named(worker.worker_id)
        if is_stuck:
            worker.stalled_s = 12.5
            eventually(lambda known=state: known.is_stalled)
        else:
            worker.mute.set()
        state.silence_s = 11.0
        eventually(lambda to=other: to.generated or future.done())
        worker, other = other, router.add_worker(f"decode-{number + 1}")
    worker.stall_after = NUM_TOKENS
    response = future.result(20)
    if is_stuck:
        assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
        assert "its loop has been stuck for 12.5 s" in response.text
        assert router.metric("tandem_workers_lost_total", reason="stalled") == 4
    else:
        assert answer(response) == expected()
        assert placed_again(router) == 5


def test_an_unreachable_worker_is_passed_over(router):
    first, second = router.add_worker("decode-0"), router.add_worker("decode-1")
    placer = router.server.state.placer
    unreachable, send = {"decode-0"}, placer._send
    placer._send = lambda worker, message: worker.key.worker_id not in unreachable and send(worker, message)
    assert post(router, max_tokens=3).status_code == 200
    assert (len(first.generated), len(second.generated)) == (0, 1)
    unreachable.add("decode-1")
    refused = post(router, max_tokens=3)
    assert refused.status_code == 503
    assert "cannot be reached" in refused.json()["error"]["message"]
    eventually(lambda: is_idle(router))


# --- hand-offs ---


def in_hand_off(router, pool):
    """Start a request whose prompt is computed, and which no decode worker has taken yet."""
    prefill, decode = make_pair(router)
    prefill.keep.set()
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: prefill.held and emitted(router) == [1])
    return future, prefill, decode, next(iter(prefill.held))


@pytest.mark.parametrize("kind", ["transfer", "overloaded", "timeout", "worker_lost"])
def test_a_failed_hand_off_goes_to_another_worker(router, pool, expected, kind):
    future, prefill, decode, request_id = in_hand_off(router, pool)
    other = prefill.peers["decode-1"] = router.add_worker("decode-1")
    prefill.keep.clear()
    prefill.fail_handover(request_id, kind, manifest_sent=True)
    assert answer(future.result(20)) == expected()
    assert len(prefill.generated) == 1
    assert [redirect.decode.incarnation for redirect in prefill.redirects] == [other.incarnation]
    assert not decode.generated and request_id in decode.aborted
    assert router.metric("tandem_handoff_redirects_total", reason=kind) == 1
    assert placed_again(router, kind) == 0
    eventually(lambda: is_idle(router))


def test_a_request_placed_again_avoids_workers_that_failed_it(router, pool, expected):
    """Otherwise the failed worker would be next in turn."""
    future, prefill, decode, request_id = in_hand_off(router, pool)
    other = router.add_worker("decode-1")
    prefill.fail_handover(request_id, "overloaded")
    eventually(lambda: prefill.redirects)
    lose(router, prefill)
    assert answer(future.result(20)) == expected()
    assert other.generated and not decode.generated
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize("stage", ["prefill", "hand-off"])
def test_the_router_redirects_when_a_decode_worker_dies(router, pool, expected, stage):
    if stage == "prefill":
        prefill, decode = make_pair(router)
        prefill.hold.set()
        future = pool.submit(post, router, **FIELDS)
        eventually(lambda: prefill.jobs)
    else:
        future, prefill, decode, _ = in_hand_off(router, pool)
    prefill.peers["decode-1"] = router.add_worker("decode-1")
    prefill.keep.clear()
    lose(router, decode)
    eventually(lambda: prefill.redirects)
    prefill.hold.clear()
    assert answer(future.result(20)) == expected()
    assert len(prefill.generated) == 1
    assert router.metric("tandem_handoff_redirects_total", reason="worker_lost") == 1
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize(
    ("kind", "manifest_sent"), [("overloaded", False), ("timeout", False), ("transfer", True)]
)
def test_the_prefill_worker_decodes_if_nobody_else_can(router, pool, expected, kind, manifest_sent):
    future, prefill, decode, request_id = in_hand_off(router, pool)
    prefill.fail_handover(request_id, kind, manifest_sent=manifest_sent)
    assert answer(future.result(20)) == expected()
    assert [redirect.decode for redirect in prefill.redirects] == [None]
    assert request_id in decode.aborted
    assert router.metric("tandem_handoff_takeovers_total", reason=kind) == 1
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize(
    ("num_others", "asked"),
    [(0, ["decode-0", None]), (2, ["decode-1", "decode-2", None]), (8, [*["another"] * 3, None])],
    ids=["the only one again", "each other once", "no more than three"],
)
def test_decode_workers_are_asked_until_the_prefill_worker_decodes(router, pool, expected, num_others, asked):
    """After broken connections. A decode worker that may meet a new reservation is not told to abort."""
    future, prefill, decode, request_id = in_hand_off(router, pool)
    for index in range(1, num_others + 1):
        router.add_worker(f"decode-{index}")
    for count in range(1, len(asked) + 1):
        assert num_others or not decode.aborted
        prefill.fail_handover(request_id, "transfer")
        eventually(lambda count=count: len(prefill.redirects) == count)
    assert answer(future.result(20)) == expected()
    found = [redirect.decode and redirect.decode.worker_id for redirect in prefill.redirects]
    assert found[-1] is None and len(found) == len(asked)
    assert num_others == 8 or set(found) == set(asked)
    assert len(set(found)) == len(found)
    eventually(lambda: is_idle(router))


def test_a_hand_off_that_failed_after_its_tokens_came(router, pool, expected):
    """The decode worker had begun, but its answer was lost and the prefill worker called the hand-off off."""
    prefill, decode = make_pair(router)
    decode.stall_after = 4
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [4])
    request_id = prefill.generated[0].request_id
    prefill.post(prefill.handover_failed(request_id, decode.incarnation, "timeout", True))
    eventually(lambda: len(prefill.generated) == 2)
    assert request_id in prefill.aborted
    eventually(lambda: request_id in decode.aborted)
    decode.stall_after = NUM_TOKENS
    assert answer(future.result(20)) == expected()
    assert len(prefill.generated[1].output_token_ids) == 4
    assert placed_again(router, "transfer") == 1
    eventually(lambda: is_idle(router))


def test_late_news_of_a_hand_off_is_ignored(router, pool):
    future, prefill, decode, request_id = in_hand_off(router, pool)

    def dropped(reason: str) -> bool:
        return router.metric("tandem_messages_dropped_total", reason=reason) == 1

    prefill.post(prefill.handover_failed("nobody", decode.incarnation, "transfer", False))
    eventually(lambda: "nobody" in prefill.aborted)
    assert dropped("unknown_request")
    prefill.post(prefill.handover_failed(request_id, "0" * 16, "transfer", False))
    eventually(lambda: dropped("redirected_before"))
    decode.post(decode.handover_failed(request_id, decode.incarnation, "transfer", False))
    eventually(lambda: dropped("not_the_holder"))
    old = prefill.handover_failed(request_id, decode.incarnation, "transfer", False, incarnation="0" * 16)
    prefill.post(old)
    eventually(lambda: dropped("stale_incarnation"))
    assert not prefill.redirects
    prefill.fail_handover(request_id, "overloaded")
    assert future.result(20).status_code == 200


def test_the_prefill_worker_that_holds_the_prompt_gets_it_again(router, pool):
    prefill, decode = make_pair(router)
    decode.stall_after = 3
    future = pool.submit(post, router, max_tokens=6)
    eventually(lambda: emitted(router) == [3])
    other = router.add_worker("prefill-1", "prefill")
    prefill.hold.set()
    other.hold.set()
    loads = []
    for worker, count in ((other, 1), (prefill, 2)):
        loads.append(pool.submit(post, router, prompt=list(range(20, 120)), max_tokens=1))
        eventually(lambda worker=worker, count=count: len(worker.generated) == count)
    prefill.peers["decode-1"] = router.add_worker("decode-1")
    lose(router, decode)
    eventually(lambda: len(prefill.generated) == 3)
    assert len(prefill.generated[2].output_token_ids) == 3
    prefill.hold.clear()
    assert future.result(20).json()["usage"]["completion_tokens"] == 6
    other.hold.clear()
    assert [load.result(20).status_code for load in loads] == [200, 200]
    assert len(other.generated) == 1, "equally loaded, and asked longer ago"


# --- role fallback ---


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_either_role_serves_alone(router, expected, missing):
    prefill, decode = make_pair(router)
    lose(router, prefill if missing == "prefill" else decode)
    alone = decode if missing == "prefill" else prefill
    assert answer(post(router, **FIELDS)) == expected()
    assert len(alone.generated) == 1
    assert router.metric("tandem_role_fallbacks_total", missing=missing) == 1


def test_a_role_without_any_worker_is_no_fallback(router):
    router.add_worker()
    assert post(router, max_tokens=2).status_code == 200
    assert router.metric("tandem_role_fallbacks_total", missing="prefill") == 0


def test_requests_that_nobody_asked_for_are_aborted(router):
    """An abort was lost with its connection."""
    worker = router.add_worker("decode-0")
    running = TokenOutput(request_id="lost", token_ids=[5])
    over = TokenOutput(request_id="over", token_ids=[5], finish_reason="length")
    worker.post(said(worker, over, running))
    eventually(lambda: worker.aborted == ["lost"])
