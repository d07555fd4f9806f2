"""While a worker is suspect, its requests also run elsewhere. Answers and counts are those of one run."""

from __future__ import annotations

import pytest

from router.dispatch import races
from tests.router.router_clients import answer, emitted, events_of, eventually, is_idle, lose, make_pair, post

NUM_TOKENS = 30
FIELDS = {"prompt": "numbers 0 1 2 3 4 5", "max_tokens": NUM_TOKENS, "return_token_ids": True, "logprobs": 1}


@pytest.fixture
def expected(undisturbed):
    return undisturbed(**FIELDS)


def freeze(worker) -> None:
    worker.hold.set()
    worker.mute.set()


def thaw(worker) -> None:
    worker.hold.clear()
    worker.mute.clear()


def copies(router) -> int:
    return len(router.server.state.journal.copies)


def frozen(router, pool, after: int = 7, **fields):
    """Start a request on a worker that then freezes, and a second worker that is not to answer yet."""
    first = router.add_worker("decode-0", stall_after=after)
    future = pool.submit(post, router, **FIELDS, **fields)
    eventually(lambda: emitted(router) == [after])
    second = router.add_worker("decode-1")
    second.hold.set()
    freeze(first)
    first.stall_after = NUM_TOKENS
    eventually(lambda: second.jobs and copies(router))
    return future, first, second


def raced(router) -> tuple[float, float]:
    """Return how many races began, and how many the copy won."""
    won = router.metric("tandem_requests_placed_again_total", reason="raced")
    return router.metric("tandem_races_total"), won


def test_the_copy_answers_for_a_frozen_worker(make_router, pool, expected):
    """Long before the worker counts as lost. Its late tokens change nothing, and everything counts once."""
    router = make_router(worker_timeout=60.0)
    future, first, second = frozen(router, pool)
    assert len(router.server.state.journal) == copies(router) == 1
    second.hold.clear()
    assert answer(future.result(20)) == expected
    assert second.generated[0].output_token_ids == first.script(first.generated[0])[:7]
    thaw(first)
    eventually(lambda: first.generated[0].request_id in first.aborted)
    eventually(lambda: is_idle(router))
    assert raced(router) == (1, 1)
    assert router.metric("tandem_generation_tokens_total") == NUM_TOKENS
    assert router.metric("tandem_raced_tokens_total") >= 7 and router.metric("tandem_raced_seconds_total") > 0
    prompt_tokens = expected["usage"]["prompt_tokens"]
    assert router.metric("tandem_api_key_tokens_total", key="0") <= prompt_tokens + NUM_TOKENS


def test_the_copy_is_withdrawn_if_the_worker_goes_on(make_router, pool, expected):
    router = make_router(worker_timeout=60.0)
    future, first, second = frozen(router, pool)
    thaw(first)
    assert answer(future.result(20)) == expected
    eventually(lambda: second.generated[0].request_id in second.aborted)
    eventually(lambda: is_idle(router))
    assert raced(router) == (1, 0)


def test_a_stream_has_each_token_once(make_router, expected):
    router = make_router(worker_timeout=60.0)
    first = router.add_worker("decode-0", stall_after=7)
    chunks = events_of(
        router, on_first=lambda: (router.add_worker("decode-1"), freeze(first)), stop=["9"], **FIELDS
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for each in choices for token in each["token_ids"]] == expected["choices"][0]["token_ids"]
    assert "".join(each["text"] for each in choices) == expected["choices"][0]["text"]
    assert raced(router) == (1, 1)


@pytest.mark.parametrize("lost", ["copy's worker", "frozen worker", "both"])
def test_a_worker_dies_during_the_race(make_router, pool, expected, lost):
    router = make_router(worker_timeout=60.0)
    future, first, second = frozen(router, pool)
    third = router.add_worker("decode-2")
    third.hold.set()
    if lost != "frozen worker":
        lose(router, second)
    if lost != "copy's worker":
        lose(router, first)
    third.hold.clear()
    second.hold.clear()
    assert answer(future.result(20)) == expected
    survivor = second if lost == "frozen worker" else third
    assert len(survivor.generated) == 1
    eventually(lambda: is_idle(router))


def test_a_client_leaves_during_the_race(make_router, pool):
    router = make_router(worker_timeout=60.0)
    _, first, second = frozen(router, pool)
    (generation,) = {each.generation for each in router.server.state.journal}
    router.server._soon(router.server.state.dispatcher.cancel, generation)
    eventually(lambda: second.generated[0].request_id in second.aborted)
    eventually(lambda: is_idle(router) and not copies(router))
    thaw(first)
    eventually(lambda: first.generated[0].request_id in first.aborted)


@pytest.mark.parametrize("task", ["prefill", "decode"])
def test_either_role_races(make_router, pool, expected, task):
    """A prefill worker before its first token, a decode worker before its own."""
    router = make_router(worker_timeout=60.0)
    prefill, decode = make_pair(router)
    (prefill if task == "prefill" else decode).hold.set()
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: prefill.generated if task == "prefill" else decode.jobs)
    other = router.add_worker("decode-1")
    prefill.peers |= {"decode-1": other}
    if task == "prefill":
        router.add_worker("prefill-1", "prefill", peers=prefill.peers)
    freeze(prefill if task == "prefill" else decode)
    assert answer(future.result(20)) == expected
    assert raced(router)[0] >= 1
    thaw(prefill)
    thaw(decode)
    eventually(lambda: is_idle(router))


@pytest.mark.parametrize("task", ["prefill", "decode"])
def test_the_other_role_answers_for_the_last_worker_of_a_role(make_router, pool, expected, task):
    router = make_router(worker_timeout=60.0)
    prefill, decode = make_pair(router)
    last, other = (prefill, decode) if task == "prefill" else (decode, prefill)
    last.hold.set()
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: prefill.generated if task == "prefill" else decode.jobs)
    freeze(last)
    assert answer(future.result(20)) == expected
    assert raced(router)[1] == 1
    assert other.generated, "it served the whole request"
    thaw(last)
    eventually(lambda: is_idle(router))


def test_requests_that_no_worker_has_yet_move(make_router, pool):
    router = make_router(worker_timeout=60.0, max_num_seqs=1)
    first = router.add_worker("decode-0")
    first.hold.set()
    futures = [pool.submit(post, router, max_tokens=2) for _ in range(8)]
    eventually(lambda: len(router.server.state.journal) == 8)
    assert router.server.state.placer.ahead.num_held(router.server.state.registry.named("decode-0")) > 0
    router.add_worker("decode-1")
    freeze(first)
    assert [future.result(20).status_code for future in futures] == [200] * 8
    assert len(first.generated) < 8 and raced(router)[1] == 8


def test_lost_workers_cost_no_budget(make_router, pool, expected, monkeypatch):
    """A second freeze races, too, although the first race was all that the budget allowed."""
    monkeypatch.setattr(races, "SHARE", 1e-9)
    router = make_router(worker_timeout=60.0)
    future, first, second = frozen(router, pool)
    second.stall_after = 15
    second.hold.clear()
    eventually(lambda: emitted(router) == [15])
    lose(router, first)
    router.add_worker("decode-2")
    freeze(second)
    assert answer(future.result(20)) == expected
    assert raced(router) == (2, 2)
    assert router.metric("tandem_races_unpaid_total") == 0


@pytest.mark.parametrize("why", ["no other worker", "no budget"])
def test_without_a_race_the_verdict_decides(make_router, pool, expected, monkeypatch, why):
    router = make_router(worker_timeout=1.0)
    monkeypatch.setattr(races, "SHARE", 0.0 if why == "no budget" else races.SHARE)
    first = router.add_worker("decode-0", stall_after=7)
    if why == "no budget":
        router.add_worker("decode-1")
    else:
        router.server.state.registry.expected = {"decode-1": "decode"}
    future = pool.submit(post, router, **FIELDS)
    eventually(lambda: emitted(router) == [7])
    freeze(first)
    eventually(lambda: not first_is_live(router))
    if why == "no other worker":
        router.add_worker("decode-1")
    assert answer(future.result(20)) == expected
    assert raced(router) == (0, 0)
    assert router.metric("tandem_races_unpaid_total") == (why == "no budget")


def first_is_live(router) -> bool:
    return router.server.state.registry.named("decode-0").live
