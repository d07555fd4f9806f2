"""Requests that are expected to miss their SLO are refused at once, and no others."""

from __future__ import annotations

import re
from math import inf

import msgspec
import pytest

from protocol.costs import StepCosts
from router.placement.cluster import Cluster
from router.placement.interface import Refusal, RequestFacts
from router.placement.predict import PredictedMiss, refusal
from tests.router.placed import decode, facts, placed, prefill
from tests.router.router_clients import eventually, is_idle, lose

HALF_SECOND_TOKENS = StepCosts(step_s=0.0, row_s=0.0, context_s=0.0, token_s=0.5, attention_s=0.0)
FIELDS = {"prompt": [7] * 10, "max_tokens": 2}
"""By these costs, the first token takes 5 s on an idle worker."""


def ask(router, **headers):
    named = {f"x-slo-{name}-ms": value for name, value in headers.items()}
    return router.http.post("/v1/completions", json=FIELDS, headers=named)


def refused(router, reason: str) -> float:
    return router.metric("tandem_requests_refused_total", reason=reason)


# --- over HTTP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["least_loaded", "cost"])
def test_a_predicted_miss_is_refused_until_the_queue_is_shorter(make_router, pool, policy):
    router = make_router(placement=policy)
    router.server.expect({"decode-0": "decode", "decode-1": "decode"})
    worker = router.add_worker(costs=HALF_SECOND_TOKENS)
    worker.hold.set()
    running = [pool.submit(ask, router, ttft="1")]
    eventually(lambda: len(worker.generated) == 1)  # there was nothing else to do
    late = ask(router, ttft="7000")
    assert (late.status_code, late.headers["retry-after"]) == (429, "4"), "3 s too late, and a moment"
    message = late.json()["error"]["message"]
    assert re.search(r"expected to take 10(\.\d)? s, the SLO is 7 s", message), message
    hopeless = ask(router, ttft="3e3")
    assert (hopeless.status_code, hopeless.headers["retry-after"]) == (503, "6"), "idle after the other's 5 s"
    assert refused(router, "slo_ttft") == 2
    assert len(router.server.state.journal) == 1
    running.append(pool.submit(ask, router, ttft="11000"))
    eventually(lambda: len(worker.generated) == 2)
    running.append(pool.submit(ask, router))
    eventually(lambda: len(worker.generated) == 3)
    worker.hold.clear()
    assert [future.result(20).status_code for future in running] == [200] * 3
    assert ask(router, ttft="7000").status_code == 200
    eventually(lambda: is_idle(router))


def test_the_default_slo_applies_to_requests_without_one(make_router, pool):
    router = make_router(slo_ttft=7.0, slo_tpot=60.0)
    worker = router.add_worker(costs=HALF_SECOND_TOKENS)
    worker.hold.set()
    running = [pool.submit(ask, router)]
    eventually(lambda: len(worker.generated) == 1)
    assert ask(router).status_code == 429
    running.append(pool.submit(ask, router, ttft="11000"))
    eventually(lambda: len(worker.generated) == 2)
    worker.hold.clear()
    assert [future.result(20).status_code for future in running] == [200] * 2


def test_a_slow_batch_refuses_requests_with_a_stricter_slo(make_router, pool):
    router = make_router()
    worker = router.add_worker(costs=StepCosts(step_s=0.0, row_s=1.0, context_s=0.0, token_s=0.0))
    worker.hold.set()
    running = [pool.submit(ask, router, tpot="1200") for _ in range(2)]
    eventually(lambda: refused(router, "slo_tpot") == 1)
    running.append(pool.submit(ask, router, tpot="2500"))
    eventually(lambda: len(worker.generated) == 2)
    assert [request.slo_tpot_s for request in worker.generated] == [1.2, 2.5], "it keeps to that as well"
    worker.hold.clear()
    assert sorted(future.result(20).status_code for future in running) == [200, 200, 429]


def test_an_accepted_request_is_never_dropped_for_its_slo(make_router, pool):
    """Its worker dies, and the other one is overloaded."""
    router = make_router()
    first, other = (router.add_worker(f"decode-{i}", costs=HALF_SECOND_TOKENS) for i in range(2))
    for worker in (first, other):
        worker.hold.set()
    running = [pool.submit(ask, router, ttft="6000") for _ in range(2)]
    eventually(lambda: first.generated and other.generated)
    lose(router, first)
    eventually(lambda: len(other.generated) == 2)
    other.hold.clear()
    assert [future.result(20).status_code for future in running] == [200] * 2


def test_choices_of_one_request_do_not_compete(make_router):
    router = make_router()
    router.add_worker(costs=HALF_SECOND_TOKENS)
    body = {**FIELDS, "n": 4}
    answer = router.http.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "6000"})
    assert answer.status_code == 200


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_non_positive_slo_is_refused_by_name(router, name, value):
    answer = router.http.post("/v1/completions", json=FIELDS, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


# --- predictions ------------------------------------------------------------------------------------


def verdict(workers, request: RequestFacts, policy: str = "cost") -> Refusal | None:
    return refusal(request, Cluster(workers), placed(policy, workers, request))


def test_cost_takes_a_dearer_worker_if_the_cheapest_is_too_late():
    """One worker has a prompt queued; at the other one 60 requests would be held up."""
    workers = [
        decode("d0", prefill_tokens=2000, prompts=1, requests=1),
        decode("d1", rows=60, requests=60, context_tokens=20_000),
    ]
    at_leisure = facts(num_tokens=512, output_tokens=128)
    soon = facts(num_tokens=512, output_tokens=128, slo_ttft_s=0.2)
    assert placed("cost", workers, at_leisure).workers == {"decode": "d0"}
    assert placed("cost", workers, soon).workers == {"decode": "d1"}
    assert verdict(workers, soon) is None


@pytest.mark.parametrize(
    "decoding", [{"row_s": 1e-3}, {"row_s": 0.0, "context_s": 1e-6}, {"row_s": 2e-3, "tokens_per_row": 2.0}]
)
def test_requests_waiting_for_prefill_do_not_count_as_decoding(decoding):
    """The first of 40 requests will have ended when this one begins to decode."""
    costs = StepCosts(**{"step_s": 0.0, "context_s": 0.0, "token_s": 1e-3, "attention_s": 0.0, **decoding})
    request = {"num_tokens": 100, "output_tokens": 51}
    workers = [decode("d0", costs=costs, rows=40, requests=40, context_tokens=40_000)]
    found = verdict(workers, facts(**request, slo_tpot_s=0.03), "least_loaded")
    assert found is not None and found.missed == "slo_tpot"
    workers[0].prefill_tokens, workers[0].prompts = 2000, 20
    assert verdict(workers, facts(**request, slo_tpot_s=0.03), "least_loaded") is None
    assert verdict(workers, facts(**request, slo_tpot_s=0.01), "least_loaded") is not None, "some still run"


def test_later_prompts_slow_decoding_on_a_worker_that_computes_them():
    costs = StepCosts(step_s=0.0, row_s=1e-3, context_s=0.0, token_s=1e-3, attention_s=0.0)
    request = facts(num_tokens=100, output_tokens=51, mean_output_tokens=51, slo_tpot_s=0.025)
    others = decode("d0", costs=costs, rows=10, requests=10, context_tokens=1000)
    assert verdict([others], request) is None, "11 ms: others compute the prompts"
    others.computed_prompts, others.computed_tokens = 10, 1000
    found = verdict([others], request)
    assert found is not None and found.missed == "slo_tpot", "ten prompts of 0.1 s in 51 steps"
    rarely = facts(num_tokens=100, output_tokens=51, mean_output_tokens=102, slo_tpot_s=0.025)
    assert verdict([others], rarely) is None


def test_requests_are_split_where_later_prompts_would_miss_the_slo_of_whole_ones():
    """Workers compute ten prompts of 0.1 s in an answer of 51 steps: 20 ms more a step for whole requests.
    If later ones are split as well, decode workers compute no more of them.
    """
    costs = StepCosts(step_s=0.0, row_s=1e-3, context_s=0.0, token_s=1e-3, attention_s=0.0)
    load = {"costs": costs, "rows": 10, "requests": 10, "context_tokens": 1000}
    load |= {"computed_prompts": 10, "computed_tokens": 1000}
    workers = [prefill("p0", **load), decode("d0", **load)]
    request = {"num_tokens": 100, "output_tokens": 51, "mean_output_tokens": 51}
    assert placed("cost", workers, facts(**request)).workers == {"decode": "d0"}
    strict = placed("cost", workers, facts(**request, slo_tpot_s=0.025))
    assert strict.workers == {"prefill": "p0", "decode": "d0"}
    assert strict.predicted.coming_s == pytest.approx(50 / 51), "ten prompts in 51 steps, it takes 50"


def test_a_split_prompt_counts_for_later_answers_on_its_prefill_worker():
    """Decoding beside the prompts of split requests would take longer than on the decode worker."""
    costs = StepCosts(step_s=0.0, row_s=1e-3, context_s=0.0, token_s=1e-3, attention_s=0.0)
    request = facts(num_tokens=100, output_tokens=51, mean_output_tokens=51, split=False)
    first = prefill("p0", costs=costs)
    workers = [first, decode("d0", costs=costs, rows=2, requests=2, context_tokens=200)]
    assert placed("cost", workers, request).workers == {"decode": "p0"}
    first.computed_prompts, first.computed_tokens = 8, 800
    assert placed("cost", workers, request).workers == {"decode": "d0"}


def test_prompts_slow_decoding_by_no_more_than_the_itl_budget():
    """Ten prompts of 0.1 s arrive meanwhile, but the ITL budget limits a step to 20 ms."""
    costs = StepCosts(step_s=5e-3, row_s=0.0, context_s=0.0, token_s=1e-3, attention_s=0.0, itl_budget_s=0.02)
    computed = {"computed_prompts": 10, "computed_tokens": 1000}
    others = decode("d0", costs=costs, rows=10, requests=10, context_tokens=1000, **computed)
    few = {"num_tokens": 100, "output_tokens": 11, "mean_output_tokens": 11}
    assert verdict([others], facts(**few, slo_tpot_s=0.025)) is None
    found = verdict([others], facts(**few, slo_tpot_s=0.02))
    assert found is not None and found.missed == "slo_tpot", "full steps may take a little longer"
    waiting = {"prefill_tokens": 1000, "prompts": 10}
    there = decode("d0", costs=costs, rows=10, requests=10, context_tokens=1000, **waiting)
    assert verdict([there, prefill("p0")], facts(**few, slo_tpot_s=0.025), "least_loaded") is None
    others.costs = StepCosts(step_s=5e-3, row_s=0.0, context_s=0.0, token_s=1e-3, attention_s=0.0)
    assert verdict([others], facts(**few, slo_tpot_s=0.025)) is not None, "nothing bounds them"


def test_a_stricter_itl_bounds_the_slowdown_by_prompts():
    """Ten prompts of 0.1 s arrive meanwhile. They always get as much time as decoding does, 5 ms."""
    costs = StepCosts(step_s=5e-3, row_s=0.0, context_s=0.0, token_s=1e-4, attention_s=0.0, itl_budget_s=0.02)
    computed = {"computed_prompts": 10, "computed_tokens": 10_000}
    others = decode("d0", costs=costs, rows=10, requests=10, context_tokens=10_000, **computed)
    few = {"num_tokens": 1000, "output_tokens": 11, "mean_output_tokens": 11}
    for asked_s in (0.025, 0.02, 0.0101):
        assert verdict([others], facts(**few, slo_tpot_s=asked_s)) is None
    found = verdict([others], facts(**few, slo_tpot_s=0.0099))
    assert found is not None and found.missed == "slo_tpot"


SLOW = StepCosts(step_s=0.0, row_s=0.01, context_s=0.0, token_s=0.01, attention_s=0.0)


@pytest.mark.parametrize(
    ("asked_s", "tokens_ahead", "retry_s", "helps"),
    [(6.0, 1000, 5.0, True), (10.0, 1000, 1.0, True), (0.5, 1000, 10.0, False), (6.0, 10**7, 3600.0, True)],
)
def test_retry_after_tells_when_the_queue_will_be_short_enough(asked_s, tokens_ahead, retry_s, helps):
    """One second alone, ten behind the queued prompt."""
    worker = decode("d0", costs=SLOW, prefill_tokens=tokens_ahead, prompts=1, requests=1)
    request = facts(num_tokens=100, output_tokens=1, slo_ttft_s=asked_s)
    found = verdict([worker], request)
    assert found is not None and found.missed == "slo_ttft"
    assert (found.retry_after_s, found.waiting_helps) == (pytest.approx(retry_s, rel=0.01), helps)


def test_retry_after_tells_when_enough_of_the_batch_will_have_ended():
    """51 tokens at 0.11 s, or 0.01 s on an idle worker: 0.06 s is half-way."""
    worker = decode("d0", costs=SLOW, rows=10, requests=10)
    request = {"num_tokens": 0, "output_tokens": 51}
    found = verdict([worker], facts(**request, slo_tpot_s=0.06))
    assert found is not None and found.missed == "slo_tpot" and found.waiting_helps
    assert found.retry_after_s == pytest.approx(0.5 * 50 * 0.11, rel=0.05)
    hopeless = verdict([worker], facts(**request, slo_tpot_s=0.005))
    assert hopeless is not None and not hopeless.waiting_helps
    assert hopeless.retry_after_s == pytest.approx(50 * 0.11)


def test_an_slo_that_only_an_idle_worker_meets_gets_a_retry_after():
    """One second alone, and beside ten rows one tenth more per chunk. Each step yields two tokens."""
    worker = decode("d0", costs=SLOW, rows=10, requests=10)
    found = verdict([worker], facts(num_tokens=100, output_tokens=1, slo_ttft_s=1.05))
    assert found is not None and found.missed == "slo_ttft" and found.waiting_helps
    worker.costs = msgspec.structs.replace(SLOW, tokens_per_row=2.0)
    found = verdict([worker], facts(num_tokens=0, output_tokens=51, slo_tpot_s=0.006))
    assert found is not None and found.missed == "slo_tpot" and found.waiting_helps


def test_an_endless_wait_may_be_retried_in_a_second():
    assert PredictedMiss("slo_ttft", decode("d0"), inf, 1.0, 1.0, inf).retry_after_s == 1.0


def test_elapsed_time_counts():
    workers = [decode("d0", requests=1, rows=1), prefill("p0", requests=1)]
    request = facts(slo_ttft_s=0.2)
    assert verdict(workers, request) is None
    assert verdict(workers, facts(slo_ttft_s=0.2, waited_s=0.19)) is not None


def test_requests_that_take_no_time_are_in_time():
    costs = StepCosts(step_s=0.0, row_s=0.0, context_s=0.0, token_s=0.0, attention_s=0.0)
    assert verdict([decode("d0", costs=costs, rows=1, requests=1)], facts(slo_tpot_s=1e-9)) is None
