"""Workers that die, lie or fall silent; clients that leave or don't read."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest

from protocol.codec import encode
from protocol.outputs import ErrorKind, TokenOutput
from protocol.worker_to_router import AbsentRequests
from tests.router.router_clients import (
    BODY,
    answer,
    ask_and_leave,
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


@pytest.fixture
def router(make_router):
    return make_router()


# --- clients ---


def test_disconnect_aborts_a_stream(router):
    _, decode = make_pair(router, step_s=0.02)
    body = {**BODY, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        request_id = next(iter(decode.jobs), None)
    eventually(lambda: request_id in decode.aborted)
    eventually(lambda: is_idle(router))
    assert router.metric("tandem_request_failures_total", kind="abort") == 1


@pytest.mark.parametrize("held", ["prefill", "decode"])
def test_disconnect_aborts_a_plain_request(router, held):
    """Each worker that may hold the request hears of it, at every stage."""
    prefill, decode = make_pair(router)
    (prefill if held == "prefill" else decode).hold.set()
    ask_and_leave(router, lambda: len(prefill.generated) == 2, n=2)
    request_ids = {request.request_id for request in prefill.generated}
    eventually(lambda: request_ids == set(decode.aborted))
    eventually(lambda: request_ids == set(prefill.aborted))
    eventually(lambda: is_idle(router))


# --- deaths ---


def test_death_in_a_stream_is_an_error_event(router):
    worker = router.add_worker(step_s=0.02)

    def die() -> None:
        lose(router, worker)

    started = time.monotonic()
    events = events_of(router, on_first=die)
    assert time.monotonic() - started < 5
    assert events[-1]["error"]["code"] == "worker_lost"
    assert "decode-0" in events[-1]["error"]["message"]
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["error"]
    assert router.metric("tandem_request_failures_total", kind="worker_lost") == 1


@pytest.mark.parametrize("how", ["without a token", "after a token", "silently"])
def test_death_of_the_only_worker_is_an_error_status(make_router, pool, how):
    router = make_router(worker_timeout=1.5 if how == "silently" else 60.0)
    sent = 0 if how == "without a token" else 3
    worker = router.add_worker(stall_after=sent)
    future = pool.submit(post, router)
    eventually(lambda: worker.generated and emitted(router) == [sent])
    router.kill(worker)
    if how != "silently":
        router.server.mark_dead(worker.worker_id, worker.incarnation, "it was killed")
    response = future.result(20)
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_lost")
    assert router.http.get("/ready").status_code == 503
    known = [worker["lifecycle"] for worker in router.http.get("/workers").json()["workers"]]
    assert known == (["silent"] if how == "silently" else [])


def test_prefill_death_after_the_hand_off_is_harmless(router):
    prefill, decode = make_pair(router, step_s=0.01)

    def die() -> None:
        eventually(lambda: any(at.prefill is None for _, at in router.server.state.journal.assigned()))
        lose(router, prefill)

    events = events_of(router, on_first=die, max_tokens=60)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not decode.aborted
    assert post(router, max_tokens=3).status_code == 200, "the decode worker serves alone"


@pytest.mark.parametrize("before", [0, 3], ids=["at first", "after a failover"])
def test_tokens_that_overtake_earlier_ones_wait(router, pool, before):
    prefill, decode = make_pair(router)
    decode.stall_after = before
    if not before:
        prefill.hold.set()
    future = pool.submit(post, router, max_tokens=6, return_token_ids=True)
    eventually(lambda: prefill.generated and emitted(router) == [before])
    if before:
        prefill.hold.set()
        lost, decode = decode, router.add_worker("decode-1")
        lose(router, lost)
        eventually(lambda: len(prefill.generated) == 2)
    request = prefill.generated[-1]
    tokens = prefill.script(request)[:6]

    def say(worker, place, count=1, finish_reason=None):
        output = TokenOutput(
            request_id=request.request_id,
            token_ids=tokens[place : place + count],
            position=place,
            finish_reason=finish_reason,
        )
        worker.post(said(worker, output))

    say(decode, before + 1)
    say(decode, before + 2, 4 - before, "length")
    eventually(lambda: [len(live.early) for live in router.server.state.journal] == [2])
    say(prefill, before)
    assert answer(future.result(20))["choices"][0]["token_ids"] == tokens
    eventually(lambda: is_idle(router))


# --- messages ---


@pytest.mark.parametrize("shift", [1, -1])
def test_tokens_that_do_not_follow_are_computed_again(router, shift):
    """A message with tokens was lost with its connection, or came twice."""
    worker = router.add_worker()
    whole = post(router, max_tokens=6, return_token_ids=True).json()["choices"][0]["token_ids"]
    usual, shifts = worker._advance, iter([0, 0, shift])

    def advance(job):
        output = usual(job)
        return msgspec.structs.replace(output, position=output.position + next(shifts, 0))

    worker._advance = advance
    answer = post(router, max_tokens=6, return_token_ids=True).json()["choices"][0]
    assert answer["token_ids"] == whole
    assert router.metric("tandem_messages_dropped_total", reason="tokens_missing") == 1
    assert router.metric("tandem_requests_placed_again_total", reason="worker_lost") == 1
    eventually(lambda: is_idle(router) and not worker.jobs)


def test_a_request_that_waits_at_its_worker_is_not_lost(router, pool, monkeypatch):
    monkeypatch.setattr("router.dispatch.races.ASK_AFTER_S", 0.1)
    prefill, decode = make_pair(router)
    asked: list[str] = []
    for worker in (prefill, decode):
        usual = worker._answer_roll_call
        worker._answer_roll_call = lambda ids, line, usual=usual: (asked.extend(ids), usual(ids, line))
    prefill.hold.set()
    answer = pool.submit(post, router, max_tokens=5)
    eventually(lambda: len(asked) >= 3)
    decode.hold.set()
    prefill.hold.clear()
    eventually(lambda: decode.jobs)
    asked.clear()
    eventually(lambda: len(asked) >= 3)
    decode.hold.clear()
    assert answer.result(20).status_code == 200
    assert len(prefill.generated) == 1 and not decode.generated
    assert router.metric("tandem_requests_lost_total") == 0


def test_missing_logprobs_fail_the_request(router):
    worker = router.add_worker()
    worker.logprob = lambda *arguments: None
    worker._advance = lambda job: TokenOutput(request_id=job.request.request_id, token_ids=[5], logprobs=[])
    assert post(router, logprobs=1).status_code == 500


def test_too_many_tokens_fail_the_request(router):
    worker = router.add_worker()
    places = itertools.count()
    worker._advance = lambda job: TokenOutput(
        request_id=job.request.request_id, token_ids=[5], position=next(places)
    )
    response = post(router, max_tokens=3)
    assert response.status_code == 500
    assert "more tokens" in response.json()["error"]["message"]
    eventually(lambda: is_idle(router) and not worker.jobs)


ERRORS = [("internal", 500), ("timeout", 504), ("overloaded", 503), ("invalid", 400)]


@pytest.mark.parametrize(("kind", "status"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_status(router, kind, status, stream):
    worker = router.add_worker()
    worker._step = lambda: [failing(worker, kind)]
    response = post(router, stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == kind
    assert "it broke" in response.json()["error"]["message"]
    assert router.metric("tandem_request_failures_total", kind=kind) == 1


def failing(worker, kind: ErrorKind) -> TokenOutput:
    return failure(worker.jobs.popitem()[0], kind)


def test_failure_in_a_batch_fails_all_of_it(router):
    worker = router.add_worker(step_s=0.02)
    usual = worker._step
    steps = iter(range(1000))
    broken: list[str] = []

    def step() -> list[TokenOutput]:
        if next(steps) != 3:
            return usual()
        output = failing(worker, "internal")
        broken.append(output.request_id)
        return [output]

    worker._step = step
    events = events_of(router, prompt=["one", "two", "three"])
    assert events[-1]["error"]["code"] == "internal"
    others = {request.request_id for request in worker.generated if request.request_id not in broken}
    assert len(others) == 2
    eventually(lambda: others <= set(worker.aborted))
    eventually(lambda: is_idle(router))


# --- limits ---


def test_timeout(make_router):
    router = make_router(request_timeout=1.5)
    worker = router.add_worker()
    worker.hold.set()
    response = post(router)
    assert response.status_code == 504
    assert "1.5 s" in response.json()["error"]["message"]
    eventually(lambda: worker.aborted == [worker.generated[0].request_id])
    worker.hold.clear()
    worker.step_s = 0.05
    events = events_of(router)
    assert events[-1]["error"]["code"] == "timeout"


def test_queue_limit(make_router, pool):
    router = make_router(max_queued_requests=2)
    worker = router.add_worker()
    worker.hold.set()
    running = [pool.submit(post, router, max_tokens=2) for _ in range(2)]
    eventually(lambda: len(worker.generated) == 2)
    refused = post(router)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "max-queued-requests=2" in refused.json()["error"]["message"]
    never = post(router, n=3).json()["error"]
    assert (never["param"], never["code"]) == ("n", "invalid_value")
    assert "limit of 2 sequences (--max-queued-requests)" in never["message"]
    worker.hold.clear()
    assert [future.result(20).status_code for future in running] == [200, 200]
    assert router.metric("tandem_request_failures_total", kind="overloaded") == 1
    assert router.metric("tandem_request_failures_total", kind="abort") == 0


def test_at_the_queue_limit_the_least_urgent_waiting_request_gives_way(make_router, pool):
    router = make_router(max_queued_requests=4)
    worker = router.add_worker()
    worker.stall_after = 1
    answered = pool.submit(post, router, priority=9, max_tokens=2)
    eventually(lambda: emitted(router) == [1])
    worker.hold.set()
    waiting = {}
    for count, priority in enumerate((5, 7, 7), 2):
        waiting[count] = pool.submit(post, router, priority=priority, max_tokens=2)
        eventually(lambda count=count: len(worker.generated) == count)
    assert post(router, priority=7).status_code == 429, "it is no more urgent than those that wait"
    assert post(router, priority=6, n=3).status_code == 429, "too few are less urgent"
    assert not any(future.done() for future in waiting.values())
    urgent = pool.submit(post, router, priority=6, max_tokens=2)
    shed = waiting.pop(4).result(20)
    assert (shed.status_code, shed.headers["retry-after"]) == (429, "1")
    eventually(lambda: worker.aborted == [worker.generated[3].request_id])
    worker.stall_after = 2**31
    worker.hold.clear()
    futures = [answered, urgent, *waiting.values()]
    assert [future.result(20).status_code for future in futures] == [200] * 4
    refused = [router.metric("tandem_requests_refused_total", reason=each) for each in ("queue_full", "shed")]
    assert refused == [2, 1]
    eventually(lambda: is_idle(router))


def test_only_a_requests_own_worker_can_report_it_lost(router, pool):
    workers = [router.add_worker(f"decode-{index}") for index in range(2)]
    for worker in workers:
        worker.hold.set()
    running = pool.submit(post, router, max_tokens=2)
    eventually(lambda: any(worker.generated for worker in workers))
    has, other = sorted(workers, key=lambda worker: len(worker.jobs), reverse=True)
    ids = [request.request_id for request in has.generated]
    other.post(
        encode(AbsentRequests(worker_id=other.worker_id, incarnation=other.incarnation, request_ids=ids))
    )
    other.post(b"the end")
    eventually(lambda: router.metric("tandem_messages_dropped_total", reason="malformed") == 1)
    for worker in workers:
        worker.hold.clear()
    assert running.result(20).status_code == 200
    assert router.metric("tandem_requests_lost_total") == 0 and not other.generated


def test_no_more_requests_give_way_than_necessary(make_router, pool):
    """The one that gives way makes room for three."""
    router = make_router(max_queued_requests=4)
    worker = router.add_worker()
    worker.hold.set()
    stays = pool.submit(post, router, priority=7, max_tokens=2)
    eventually(lambda: len(worker.generated) == 1)
    goes = pool.submit(post, router, priority=8, max_tokens=2, n=3)
    eventually(lambda: len(worker.generated) == 4)
    urgent = pool.submit(post, router, priority=6, max_tokens=2, n=2)
    assert goes.result(20).status_code == 429
    eventually(lambda: len(worker.generated) == 6)
    worker.hold.clear()
    assert [future.result(20).status_code for future in (stays, urgent)] == [200, 200]


# --- the host ---


def test_a_clock_that_jumps_changes_nothing(router, monkeypatch):
    """Deadlines and silence count by the monotonic clock."""
    make_pair(router, step_s=0.02)
    expected = post(router).json()["choices"]
    jumps = itertools.cycle([1.0, 2.0**31, time.time()])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(next(jumps)) * 10**9)
    for _ in range(5):
        assert post(router).json()["choices"] == expected
    assert router.metric("tandem_workers_lost_total") == 0
