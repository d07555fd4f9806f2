"""The router plans where drafts are made, and revises its plans while requests run."""

from __future__ import annotations

import asyncio
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.config import ServeConfig
from protocol.requests import DraftPlan
from protocol.roles import ROLES
from protocol.speculation import SpeculativeConfig
from router.dispatch import Core, draft_planner
from router.dispatch.draft_planner import DraftPlanner
from router.observe.metrics import Metrics
from router.placement import drafts
from router.placement.interface import WorkerSnapshot
from tests.router.placed import CPU_LIKE, GPU_LIKE, drafter, speculation
from tests.router.router_clients import emitted, eventually, is_idle, lose, make_pair, post

DRAFTS = SpeculativeConfig(method="draft_model", model="m")
COSTLY_HERE = GPU_LIKE | {"level_s": 6e-3}
LONG = 300


@pytest.fixture
def predictions_stand(monkeypatch):
    """Disable learning: these workers' speed does not depend on where drafts are made."""
    monkeypatch.setattr(drafts, "LEAST_S", inf)


@pytest.fixture
def make(make_router, predictions_stand):
    """Make a router and its decode worker."""

    def make(model=GPU_LIKE, **options):
        router = make_router(**{"speculative_config": DRAFTS, "max_num_seqs": 64, **options})
        return router, router.add_worker("decode-0", speculation=speculation(**model), step_s=0.005)

    return make


def add_drafter(router, name="draft-0"):
    return router.add_worker(name, "draft", costs=drafter().costs)


def begin(router, pool, count=1, **fields):
    """Start long requests, and return once each has a token."""
    before = len(emitted(router))
    found = [pool.submit(post, router, **{"max_tokens": LONG, **fields}) for _ in range(count)]
    eventually(lambda: len(emitted(router)) == before + count and all(emitted(router)))
    return found


def end(router, *running) -> None:
    """Let the workers send all the tokens that are left at once."""
    for worker in router.workers:
        worker.tokens_per_step = LONG
    assert all(future.result().status_code == 200 for future in running)


def sweep(router) -> None:
    """Revise the plans now, whenever the loop would do so."""

    async def look() -> None:
        router.server.state.placer.drafts.sweep()

    asyncio.run_coroutine_threadsafe(look(), router.server._loop).result(20)


def plans(router) -> list[DraftPlan | None]:
    return [request.drafts.plan for request in router.server.state.journal]


def wheres(router) -> set[str]:
    """Return where drafts are made for the requests that are placed now."""
    periods = [request.drafts.current for request in router.server.state.journal]
    return {period.decision.place.where for period in periods if period is not None}


def test_a_plan_goes_with_each_request(make):
    router, decode = make()
    post(router, max_tokens=2)
    post(router, max_tokens=2, speculative={"enabled": False})
    post(router, max_tokens=2, speculative={"method": "ngram", "num_speculative_tokens": 3})
    assert [request.draft_plan for request in decode.generated] == [
        DraftPlan(method="draft_model", max_tokens=8),
        DraftPlan(max_tokens=0),
        DraftPlan(method="ngram", max_tokens=3),
    ]
    assert router.metric("tandem_draft_plans_total", place="local") == 2
    assert router.metric("tandem_draft_plans_total", place="none") == 1


def test_without_drafts_nothing_is_planned(make):
    router, decode = make(speculative_config=None)
    assert post(router, max_tokens=2).status_code == 200
    assert decode.generated[0].draft_plan is None
    assert router.http.get("/decisions").json()["decisions"][0]["drafts"] is None
    post(router, max_tokens=2, speculative={"method": "ngram", "num_speculative_tokens": 3})
    assert decode.generated[1].draft_plan == DraftPlan(method="ngram", max_tokens=3), "unless the client asks"


def test_a_draft_worker_makes_drafts_that_are_costly_locally_and_gets_no_requests(make, pool):
    router, decode = make(COSTLY_HERE)
    shared = add_drafter(router)
    running = begin(router, pool, 2)
    (plan,) = {(plan.method, plan.at.worker_id, plan.at.incarnation) for plan in plans(router)}
    assert plan == ("draft_model", "draft-0", shared.incarnation)
    assert router.server.state.registry.named("draft-0").load.rows == 2
    found = router.http.get("/cluster").json()
    assert found["drafts"] == [{"decode": "decode-0", "at": "draft-0", "requests": 2}]
    end(router, *running)
    assert shared.generated == [] and not decode.replans
    eventually(lambda: is_idle(router))
    load = router.server.state.registry.named("draft-0").load
    assert (load.rows, load.requests, load.context_tokens) == (0, 0, 0)


def test_a_lost_draft_worker_is_replanned_at_once_and_used_again(make, pool):
    router, decode = make(COSTLY_HERE)
    shared = add_drafter(router)
    running = begin(router, pool, 2, return_timing=True)
    lose(router, shared)
    eventually(lambda: len(decode.replans) == 2)
    assert {replan.plan for replan in decode.replans} == {DraftPlan(method="draft_model", max_tokens=8)}
    # a plan is counted once it is sent
    eventually(lambda: router.metric("tandem_draft_replans_total", reason="lost") == 2)
    again = add_drafter(router)
    eventually(lambda: len(decode.replans) == 4)
    assert {replan.plan.at.incarnation for replan in decode.replans[2:]} == {again.incarnation}
    end(router, *running)
    assert router.metric("tandem_draft_replans_total", reason="load") == 2
    for future in running:
        periods = future.result().json()["timing"]["choices"][0]["drafts"]
        assert [period["where"] for period in periods] == ["remote", "local", "remote"]
        assert sum(period["tokens"] for period in periods) == LONG - 1


def test_draft_workers_hear_of_a_lost_decode_worker(make, pool):
    router, decode = make(COSTLY_HERE)
    shared = add_drafter(router)
    running = begin(router, pool)
    other = router.add_worker("decode-1", step_s=0.001)
    lose(router, decode)
    end(router, *running)
    eventually(lambda: shared.gone)
    router.server.mark_dead("decode-0", decode.incarnation, "the launcher tells again")
    lose(router, add_drafter(router, "draft-1"))
    other.mute.set()
    eventually(lambda: len(shared.gone) > 1)
    assert shared.gone == [("decode-0", decode.incarnation), ("decode-1", other.incarnation)]
    assert other.gone == [], "it drafts for nobody"


def test_observations_of_a_lost_worker_are_dropped(make, pool):
    router, decode = make()
    other = router.add_worker("decode-1", speculation=speculation())
    running = begin(router, pool, 2)
    kinds = router.server.state.placer.drafts._kinds
    assert {key[0].key.worker_id for key in kinds} == {"decode-0", "decode-1"}
    lose(router, decode)
    end(router, *running)
    assert {key[0].key.worker_id for key in kinds} == {other.worker_id}


def test_a_draft_worker_that_is_drained_loses_its_requests_and_leaves(make, pool):
    router, decode = make(COSTLY_HERE)
    add_drafter(router)
    running = begin(router, pool)
    answer = router.http.post("/workers/draft-0/drain")
    assert answer.status_code == 200, answer.text
    eventually(lambda: decode.replans)
    assert decode.replans[-1].plan == DraftPlan(method="draft_model", max_tokens=8)
    eventually(lambda: router.metric("tandem_draft_replans_total", reason="lost") == 1)
    end(router, *running)


def test_drafts_stay_with_the_decode_worker_under_a_load_at_which_none_pay(make, pool):
    """It stops them itself, and begins again; a plan without drafts would teach it nothing."""
    router, decode = make(CPU_LIKE | {"token_s": 0.5e-3})
    running = begin(router, pool, 8)
    for _ in range(3):
        sweep(router)
    assert wheres(router) == {"local"}
    end(router, *running)
    assert not decode.replans


@pytest.mark.parametrize("where", ["none", "local", "remote"])
@pytest.mark.parametrize("who", ["operator", "client"])
def test_the_place_can_be_fixed(make, who, where):
    """The client's wish goes first."""
    other = "local" if where == "none" else "none"
    router, decode = make(draft_placement=where if who == "operator" else other)
    add_drafter(router)
    wish = {"place": where} if who == "client" else {}
    for more in ({}, {"num_speculative_tokens": 2}):
        post(router, max_tokens=2, speculative=wish | more)
    plan, of_two = (request.draft_plan for request in decode.generated)
    for each in (plan,) if (who, where) == ("operator", "none") else (plan, of_two):
        assert (each.method is None, each.at is not None) == (where == "none", where == "remote")
    assert of_two.max_tokens == (0 if (who, where) == ("client", "none") else 2)


def test_observed_gains_correct_predictions(make_router, pool):
    """This worker yields a token of each request every 40 ms, whatever it drafts."""
    router = make_router(speculative_config=DRAFTS, max_num_seqs=64)
    router.add_worker("decode-0", speculation=speculation(start_s=480e-3), step_s=0.04)
    for _ in range(2):
        running = begin(router, pool, 4, max_tokens=40)
        assert all(future.result().status_code == 200 for future in running)
    latest = router.http.get("/decisions").json()["decisions"][0]["drafts"]
    assert latest["chosen"]["where"] == "local"
    predicted = latest["chosen"]["predicted"]
    # The worker yields 25 tokens a second, so four requests get 100. A slow host delays some and bunches
    # others.
    assert 50 < predicted["tokens_per_s"] < 200
    assert predicted["seen_to_predicted"] > 2


def test_handed_over_requests_are_planned_again_once_they_decode(make_router, pool):
    router = make_router(speculative_config=DRAFTS)
    prefill, decode = make_pair(router, speculation=speculation(**COSTLY_HERE), step_s=0.005)
    prefill.keep.set()
    running = pool.submit(post, router, max_tokens=LONG)
    eventually(lambda: prefill.held)
    eventually(lambda: all(emitted(router)))
    add_drafter(router)
    assert prefill.generated[0].draft_plan == DraftPlan(method="draft_model", max_tokens=8)
    (job,) = prefill.held.values()
    prefill.keep.clear()
    sweep(router)
    assert wheres(router) == {"local"}, "the decode worker does not know the request yet"
    del prefill.held[job.request.request_id]
    prefill._hand_over(job)
    eventually(lambda: decode.replans)
    assert decode.replans[0].plan.at.worker_id == "draft-0"
    end(router, running)
    assert not prefill.replans


def test_a_request_without_a_token_is_not_planned_again(make, pool):
    router, decode = make(COSTLY_HERE)
    decode.hold.set()
    running = pool.submit(post, router, max_tokens=LONG)
    eventually(lambda: decode.generated)
    add_drafter(router)
    sweep(router)
    assert wheres(router) == {"local"}
    decode.hold.clear()
    eventually(lambda: wheres(router) == {"remote"})
    end(router, running)


def test_the_batch_size_limits_the_counted_requests():
    config = ServeConfig(model="m", max_num_seqs=4)
    unused: Any = None
    planner = DraftPlanner(Core(config, unused, unused, Metrics("m", []), unused), unused)

    def rows(decoded: float) -> float:
        load = WorkerSnapshot("decode-0", ROLES["decode"].tasks, requests=9, rows=decoded)
        worker: Any = SimpleNamespace(load=load, state=SimpleNamespace(speculation=None))
        return planner._target(worker).rows

    assert [rows(3), rows(5)] == [3, 4]


def test_drafts_follow_a_request_to_another_decode_worker(make_router, predictions_stand, pool):
    router = make_router(speculative_config=DRAFTS)
    add_drafter(router)
    known = {"speculation": speculation(**COSTLY_HERE), "step_s": 0.005}
    prefill, decode = make_pair(router, **known)
    prefill.keep.set()
    running = pool.submit(post, router, max_tokens=LONG)
    eventually(lambda: prefill.held)

    def drafting() -> list[tuple[str, int]]:
        return [(each["decode"], each["requests"]) for each in router.http.get("/cluster").json()["drafts"]]

    def counted() -> list[tuple[str, int]]:
        """Return the counted drafts, by which the router estimates a draft worker's load from others."""
        pairs = dict(router.server.state.placer.drafts._drafting).items()
        return [(decode, count) for (decode, _), count in pairs]

    assert drafting() == counted() == [("decode-0", 1)]
    prefill.peers["decode-1"] = other = router.add_worker("decode-1", **known)
    prefill.keep.clear()
    lose(router, decode)
    eventually(lambda: drafting() == counted() == [("decode-1", 1)])
    end(router, running)
    assert not other.replans, "its plan holds there, too"
    eventually(lambda: is_idle(router))


def test_a_decode_worker_counts_its_own_requests_once(make, pool):
    """Requests of other decode workers are the others at a draft worker."""
    router, _ = make(COSTLY_HERE)
    add_drafter(router)
    running = begin(router, pool, 2)
    planner = router.server.state.placer.drafts
    request = next(iter(router.server.state.journal))
    known = router.server.state.registry.named
    kind = planner._kinds[draft_planner._key(request, request.current)]
    own, another = (planner._drafters(known(name), kind) for name in ("decode-0", "draft-0"))
    router.add_worker("decode-1", speculation=speculation(**COSTLY_HERE))
    eventually(lambda: router.server.state.registry.current_of("decode-1"))
    others = planner._drafters(known("decode-1"), kind)
    assert ([each.others for each in own], another, [each.others for each in others]) == ([0], [], [2])
    end(router, *running)


def test_a_long_sweep_resumes_where_it_stopped(monkeypatch):
    now, looked_at = 0.0, []
    monkeypatch.setattr(draft_planner, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow(DraftPlanner):
        def _reconsider(self, request, at):
            nonlocal now
            now += 0.6 * draft_planner.SWEEP_S
            looked_at.append(request)

    journal = [(name, None) for name in "abcde"]
    source: Any = SimpleNamespace(assigned=lambda: journal)
    unused: Any = None
    planner = Slow(Core(ServeConfig(model="m"), source, unused, Metrics("m", []), unused), unused)
    for _ in range(4):
        planner.sweep()
    assert "".join(looked_at) == "abcdeab"
    del journal[1:]
    planner.sweep()
    assert looked_at[-1] == "a"


def test_plans_are_shown(make, caplog):
    router, decode = make(COSTLY_HERE, log_level="debug")
    caplog.set_level("DEBUG", "router")
    decode.tokens_per_step, decode.rejected_per_step = 3, 2
    add_drafter(router)
    timing = post(router, max_tokens=31, return_timing=True).json()["timing"]
    assert any(", drafts remote" in line for line in caplog.messages)
    (period,) = timing["choices"][0]["drafts"]
    assert (period["where"], period["worker"], period["method"]) == ("remote", "draft-0", "draft_model")
    assert (period["steps"], period["tokens"]) == (10, 30), "all but the first"
    assert period["drafted_tokens"] >= period["accepted_tokens"] > 0
    (decision,) = router.http.get("/decisions").json()["decisions"]
    drafts = decision["drafts"]
    assert drafts["chosen"]["where"] == "remote" and drafts["replans"] == 0 and drafts["reason"]
    assert [option["where"] for option in drafts["alternatives"]] == ["none", "local"]
    rates = [option["predicted"]["tokens_per_s"] for option in (drafts["chosen"], *drafts["alternatives"])]
    assert rates[0] > rates[2] > rates[1] > 0
    assert router.metric("tandem_draft_plan_steps_total", place="remote") == 10
    assert router.metric("tandem_draft_plan_observed_tokens_total", place="remote") == 30
    predicted = router.metric("tandem_draft_plan_predicted_tokens_total", place="remote")
    assert predicted == pytest.approx(10 * drafts["chosen"]["predicted"]["tokens_per_step"])


def test_requests_stay_with_their_draft_worker_though_others_are_less_loaded(make, pool):
    """The router compares the two least loaded of the three, and the one that the other requests use."""
    router, decode = make(COSTLY_HERE)
    for name in ("draft-0", "draft-1", "draft-2"):
        add_drafter(router, name)
    running = begin(router, pool, 3)
    assert len({plan.at.worker_id for plan in plans(router)}) == 1
    assert all(future.result().status_code == 200 for future in running)
    assert not decode.replans
