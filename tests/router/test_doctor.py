"""The doctor's verdicts from two readings: each bottleneck is named where it exists, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.cli import app
from protocol.costs import StepCosts
from protocol.roles import ROLES
from protocol.speculation import SpeculationState, StepTimeState
from protocol.worker_to_router import PairState, WorkerState
from router.doctor import DRAFT_LOSS, ClusterSample, Finding, WorkerSample, examine
from router.placement.interface import WorkerSnapshot
from tests.e2e.load import load
from tests.router.router_clients import eventually, lose, post

COSTS = StepCosts(step_s=2e-3, row_s=1e-4, context_s=0.0, token_s=1e-4, attention_s=0.0)
SECONDS = 2.0
DRAFTS = {
    'spec_decode_steps_total{drafts="yes"}': 100.0,
    'spec_decode_num_drafts_total{method="ngram"}': 400.0,
    'spec_decode_num_draft_tokens_total{method="ngram"}': 1600.0,
    'spec_decode_num_accepted_tokens_total{method="ngram"}': 100.0,
    'spec_decode_draft_seconds_total{method="ngram"}': 0.2,
    "spec_decode_verify_seconds_total": 0.6,
}
"""Four requests draft four tokens each, of which one sixteenth is accepted, in steps of 8 ms."""


def worker(base: WorkerSample, **changes: Any) -> WorkerSample:
    """Return a sample with these fields of its state or its load."""
    state = {name: value for name, value in changes.items() if name in WorkerState.__struct_fields__}
    load = {name: value for name, value in changes.items() if name not in state and name != "held"}
    return WorkerSample(
        msgspec.structs.replace(base.state, **state),
        dataclasses.replace(base.load, **load),
        changes.get("held", base.held),
    )


def sample(name: str, role: str, **load: Any) -> WorkerSample:
    state = WorkerState(worker_id=name, incarnation=name, role=role, costs=COSTS)
    return WorkerSample(state, WorkerSnapshot(name, ROLES[role].tasks, **load))


PREFILL = sample("prefill-0", "prefill")
DECODE = sample("decode-0", "decode", kv_tokens=10_000)


def looks(
    *workers: tuple[WorkerSample, dict[str, Any]],
    totals: dict[str, float] | None = None,
    before: dict[str, Any] | None = None,
    **after: Any,
) -> tuple[ClusterSample, ClusterSample]:
    """Return two readings: the workers' constant state, and what their totals gained between the two."""
    pairs = workers or ((PREFILL, {}), (DECODE, {}))
    first = [each for each, _ in pairs]
    then = [worker(each, **gained) for each, gained in pairs]
    return (
        ClusterSample(at=100.0, workers=first, max_num_seqs=16, **(before or {})),
        ClusterSample(at=100.0 + SECONDS, workers=then, max_num_seqs=16, totals=totals or {}, **after),
    )


def steps(count: int, seconds: float, tokens: float = 0.0, **counters: float) -> dict[str, Any]:
    counted = {"engine_seconds_total": seconds, "computed_tokens_total": tokens, **counters}
    return {"steps": count, "counters": counted}


def sent(busy_s: float, nbytes: float = 0.0) -> dict[str, Any]:
    counters = {"kv_transfer_busy_seconds_total": busy_s, "kv_transfer_bytes_total": nbytes}
    return {"pairs": [PairState(peer="decode-0", transport="tcp", in_use=True, counters=counters)]}


def transfer_totals(exposed_s: float, prefill_s: float = 0.5, count: float = 10.0) -> dict[str, float]:
    return {
        "request_kv_transfer_exposed_time_seconds_sum": exposed_s * count,
        "request_kv_transfer_exposed_time_seconds_count": count,
        "request_prefill_time_seconds_sum": prefill_s * count,
        "request_prefill_time_seconds_count": count,
    }


def names(pair: tuple[ClusterSample, ClusterSample]) -> list[str]:
    return [finding.name for finding in examine(*pair)]


BUSY_PREFILL = worker(PREFILL, prompts=8.0, num_running=2)
BUSY_DECODE = worker(DECODE, num_running=40, rows=40.0, context_tokens=4000.0)
LINKED = worker(PREFILL, pairs=[PairState(peer="decode-0", transport="tcp", in_use=True)])
FULL_POOL = worker(DECODE, num_waiting=5, num_running=3, rows=8.0, kv_usage=0.95)
DRAFTING = worker(
    DECODE,
    num_running=4,
    rows=4.0,
    speculation=SpeculationState(
        step_time=StepTimeState(sequences=[1, 4], drafted=[0, 4], seconds=[[0.003, 0.006], [0.004, 0.007]])
    ),
)
FULL_BATCH = worker(DECODE, num_running=16, rows=40.0, held=20)

PROVOKED: dict[str, tuple[ClusterSample, ClusterSample]] = {
    "prefill": looks((BUSY_PREFILL, steps(40, 1.9, 19_000.0)), (DECODE, steps(40, 0.1))),
    "decode": looks((PREFILL, {}), (BUSY_DECODE, steps(316, 1.9, 316 * 40.0))),
    "transfer": looks((LINKED, sent(1.5, 1e6)), (DECODE, {}), totals=transfer_totals(0.3)),
    "router": looks(totals={"router_cpu_seconds_total": 1.8, "generation_tokens_total": 9e3}, live=40),
    "kv_room": looks((FULL_POOL, steps(200, 0.6, kv_room_wait_seconds_total=1.8))),
    "queue": looks((FULL_BATCH, steps(400, 1.4))),
    "draft": looks((DRAFTING, steps(100, 0.9, **DRAFTS))),
}
LATE = {
    "router_cpu_seconds_total": 0.2,
    "router_loop_lag_seconds_sum": 0.4,
    "router_loop_lag_seconds_count": 8.0,
}
PAYING = DRAFTS | {'spec_decode_num_accepted_tokens_total{method="ngram"}': 900.0}
NOT_QUITE: dict[str, tuple[ClusterSample, ClusterSample]] = {
    "a prefill worker that keeps up": looks((BUSY_PREFILL, steps(40, 1.0, 19_000.0))),
    "a prefill worker with one prompt": looks((worker(PREFILL, prompts=1.0), steps(40, 1.9, 19_000.0))),
    "prompts that wait for blocks": looks(
        (BUSY_PREFILL, steps(40, 1.9, 19_000.0, kv_room_wait_seconds_total=1.8))
    ),
    "one stream on a busy worker": looks((worker(DECODE, num_running=1, rows=1.0), steps(900, 1.95, 900.0))),
    "a batch that hardly slows its rows": looks(
        (worker(DECODE, num_running=8, rows=8.0), steps(690, 1.95, 8 * 690.0))
    ),
    "a transfer that the prefill hides": looks(
        (LINKED, sent(0.1)), (DECODE, {}), totals=transfer_totals(0.02)
    ),
    "a transfer that takes no longer than its messages": looks(
        (LINKED, sent(0.5)), (DECODE, {}), totals=transfer_totals(0.01, 0.01, 100)
    ),
    "a router that is late for want of cores": looks(totals=LATE, live=40),
    "a full pool that nobody waits for": looks((worker(FULL_POOL, num_waiting=0), steps(200, 0.6))),
    "a full batch that nobody waits for": looks((worker(FULL_BATCH, held=0), steps(400, 1.4))),
    "drafts that pay": looks((DRAFTING, steps(100, 0.9, **PAYING))),
    "an idle server": looks(),
    "a server without workers": (ClusterSample(at=1.0), ClusterSample(at=2.0)),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_each_bottleneck_is_named_and_no_other(name: str) -> None:
    (finding,) = examine(*PROVOKED[name])
    assert finding.name == name
    assert finding.cost > 0 and finding.summary and finding.change and finding.figures


@pytest.mark.parametrize("case", NOT_QUITE)
def test_a_healthy_server_has_no_bottleneck(case: str) -> None:
    assert names(NOT_QUITE[case]) == ["nothing"]


def test_the_most_costly_bottleneck_comes_first() -> None:
    both = looks(
        (BUSY_PREFILL, steps(40, 1.9, 19_000.0)),
        (FULL_BATCH, steps(400, 1.4)),
        totals={"router_cpu_seconds_total": 1.9},
        live=10,
    )
    found = examine(*both)
    assert [finding.name for finding in found] == ["queue", "prefill", "router"]
    assert [finding.cost for finding in found] == sorted([each.cost for each in found], reverse=True)


def test_refusals_name_the_limit_that_was_reached() -> None:
    for reason, option in {
        "queue_full": "--max-queued-requests",
        "shed": "--max-queued-requests",
        "slo_ttft": "--slo-ttft",
        "slo_tpot": "--slo-tpot",
        "no_worker": "tandem status",
    }.items():
        (finding,) = examine(*looks(refused={reason: 20.0}, before={"refused": {reason: 4.0}}))
        assert (finding.name, finding.figures["refused_per_s"]) == ("queue", 8.0)
        assert option in finding.change
        assert names(looks(refused={reason: 4.0}, before={"refused": {reason: 4.0}})) == ["nothing"]


def test_requests_that_wait_for_a_worker() -> None:
    (finding,) = examine(*looks(before={"parked": 4}, parked=4))
    assert (finding.name, finding.cost) == ("queue", 4.0)


def test_preemptions_and_waits_for_reservations_mean_too_little_room() -> None:
    (lost,) = examine(*looks((worker(DECODE, kv_usage=0.8), {"num_preemptions": 6})))
    (waited,) = examine(*looks((DECODE, steps(10, 0.1, reservation_wait_seconds_total=3.0))))
    assert (lost.name, lost.cost) == ("kv_room", 3.0)
    assert (waited.name, waited.cost) == ("kv_room", 1.5)


def test_drafts_are_compared_with_plain_steps() -> None:
    def judged(accepted: float) -> list[str]:
        counters = DRAFTS | {'spec_decode_num_accepted_tokens_total{method="ngram"}': accepted}
        return names(looks((DRAFTING, steps(100, 0.9, **counters))))

    even = 400 * (0.008 / 0.004 - 1)
    """Steps take twice as long and yield twice as many tokens."""
    assert judged(even * (1 - 3 * DRAFT_LOSS)) == ["draft"]
    assert judged(even) == ["nothing"]


def test_time_lost_to_drafts_is_not_blamed_on_the_batch() -> None:
    """Eight rows slow each other 1.6 times, which is less than the cost of their drafts."""
    costs = StepCosts(step_s=4e-3, row_s=3.5e-4, context_s=0.0)
    drafts = DRAFTS | {
        'spec_decode_steps_total{drafts="yes"}': 140.0,
        'spec_decode_num_drafts_total{method="ngram"}': 8 * 140.0,
        "spec_decode_verify_seconds_total": 1.7,
    }
    pair = looks((worker(DECODE, num_running=8, rows=8.0, costs=costs), steps(140, 1.9, **drafts)))
    assert names(pair) == ["draft", "decode"]


def test_a_restarted_worker_is_left_out() -> None:
    """Its totals restarted from 0."""
    old = worker(BUSY_PREFILL, steps=5000)
    pair = looks((old, {"steps": 3}))
    assert names(pair) == ["nothing"]
    only_new = ClusterSample(at=0.0), pair[1]
    assert names(only_new) == ["nothing"]


# --- over HTTP ------------------------------------------------------------------------------------


def doctor(router: Any, seconds: float = 0.6) -> list[Finding]:
    answer = router.http.get("/doctor", params={"seconds": seconds})
    assert answer.status_code == 200, answer.text
    return [Finding(**finding) for finding in answer.json()["findings"]]


def test_an_idle_server_has_no_findings(make_router) -> None:
    router = make_router()
    router.add_worker()
    (finding,) = doctor(router)
    assert (finding.name, finding.cost) == ("nothing", 0.0)
    assert router.metric("tandem_router_cpu_seconds_total") > 0
    assert router.metric("tandem_router_loop_lag_seconds_count") > 0


def test_the_command_prints_findings_or_json(make_router) -> None:
    """It uses the first of several keys."""
    router = make_router(api_key="a,b")
    router.add_worker()
    run = CliRunner().invoke
    options = ["doctor", "--url", router.url, "--api-key", "a,b", "--seconds", "0.3"]
    assert run(app, options).stdout.startswith("nothing is wrong\n")
    (finding,) = json.loads(run(app, [*options, "--json"]).stdout)["findings"]
    assert finding["name"] == "nothing"
    refused = run(app, [*options[:3], "--api-key", "c"])
    assert (refused.exit_code, "401" in refused.stderr) == (1, True)


def test_refused_and_parked_requests_are_seen(make_router, pool) -> None:
    router = make_router(max_queued_requests=3)
    router.server.expect({"decode-0": "decode"})
    lose(router, router.add_worker("decode-0"))
    eventually(lambda: router.http.get("/ready").status_code == 503)
    waiting = [pool.submit(post, router, max_tokens=3) for _ in range(3)]
    eventually(lambda: router.metric("tandem_num_requests_parked") == 3)
    watching = pool.submit(doctor, router, 1.0)
    while not watching.done():
        assert post(router, max_tokens=3).status_code == 429
    # In addition, so many refusals keep the router itself busy.
    queued = [finding for finding in watching.result(20) if finding.name == "queue"]
    found = {finding.summary.partition("(")[2]: finding for finding in queued}
    assert found.keys() == {"queue_full)", ""} and found[""].figures == {"parked": 3.0}
    router.add_worker("decode-0")
    assert [each.result(20).status_code for each in waiting] == [200] * 3


def test_many_streams_with_log_probabilities_wait_for_the_router(make_router) -> None:
    """The worker has all tokens at once."""
    router = make_router()
    router.add_worker(step_s=0.0, tokens_per_step=4)
    with load(router.url, 48, 8, 500, max_tokens=400, logprobs=2):
        for _ in range(8):
            found = doctor(router, 1.0)
            if found[0].name == "router":
                break
    assert [finding.name for finding in found] == ["router"]
