"""The rules by which a role gets more or fewer workers, each at its limit and beyond."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import exp, inf

import msgspec
import pytest

from protocol.costs import StepCosts
from protocol.roles import WorkerRange
from router.placement.interface import Refusal
from router.scaling.decide import (
    INTERVAL_S,
    OfferedLoad,
    RoleLoad,
    ScalerState,
    ScalingDecision,
    ScalingFacts,
    ScalingPolicy,
    decide,
    late_share,
    needed,
)
from router.scaling.interface import ScaleAnswer
from router.workers.assignment import Assignment, DemandMeter, RoleDemand
from tests.router.router_clients import eventually, post

COSTS = StepCosts(step_s=0.01, row_s=0.001, context_s=0.0, token_s=0.001)


@dataclass
class Day:
    """A cluster whose load is set by the test. `pass_s` lets time pass and returns the decisions."""

    prefill: RoleLoad = field(default_factory=lambda: RoleLoad(2, costs=COSTS))
    decode: RoleLoad = field(default_factory=lambda: RoleLoad(2, costs=COSTS))
    room: int = 100
    slo_ttft_s: float = 10.0
    slo_tpot_s: float = 0.1
    now: float = 1000.0
    state: ScalerState = field(default_factory=ScalerState)
    roles: tuple[str, ...] = ("prefill", "decode")
    bounds: WorkerRange = field(default_factory=lambda: WorkerRange(1, 8))

    @property
    def policy(self) -> ScalingPolicy:
        return ScalingPolicy(dict.fromkeys(self.roles, self.bounds))

    def pass_s(self, seconds: float, rate: float = 0.0, prompt_s: float = 1.0) -> list[ScalingDecision]:
        decisions = []
        for _ in range(round(seconds / INTERVAL_S)):
            self.now += INTERVAL_S
            count = round(rate * INTERVAL_S)
            more = RoleDemand(count, count * prompt_s, count * prompt_s**2)
            self.prefill = self.prefill._replace(demand=self.prefill.demand + more)
            facts = ScalingFacts(
                self.now,
                {"prefill": self.prefill, "decode": self.decode, "draft": self.decode},
                {"prefill": self.room, "decode": self.room, "draft": self.room},
                self.slo_ttft_s,
                self.slo_tpot_s,
            )
            decision, self.state = decide(facts, self.policy, self.state)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def answers(self, judged: int, missed: int) -> None:
        demand = msgspec.structs.replace(self.prefill.demand, judged=judged, missed=missed)
        self.prefill = self.prefill._replace(demand=demand)


def targets(decisions: list[ScalingDecision]) -> list[dict[str, int]]:
    return [dict(decision.targets) for decision in decisions]


def test_the_chance_to_wait_is_erlangs():
    """For one worker it equals the load. Under overload every request waits, for any number of workers."""
    assert late_share(1, 0.5, 1.0, 0.0) == pytest.approx(0.5)
    assert late_share(1, 0.5, 1.0, 2.0) == pytest.approx(0.5 * exp(-1))
    assert late_share(2, 1.0, 1.0, 0.0) == pytest.approx(1 / 3)
    assert late_share(3, 3.0, 1.0, 9.0) == 1.0


def test_workers_are_added_before_prompts_wait_too_long():
    assert Day().pass_s(200, rate=1.0) == [], "two workers for one worker's work are enough"
    (decision,) = Day().pass_s(5 * INTERVAL_S, rate=1.8)[:1]
    assert decision.targets == {"prefill": 3} and "would wait too long" in decision.reasons["prefill"]


def test_a_queue_of_prompts_adds_workers_at_once():
    day = Day()
    assert day.pass_s(60) == []
    day.prefill = day.prefill._replace(backlog_s=9.9)
    assert day.pass_s(10) == [], "two have done that in half the SLO"
    day.prefill = day.prefill._replace(backlog_s=21.0)
    (decision,) = day.pass_s(INTERVAL_S)
    assert decision.targets == {"prefill": 3} and "21.0 s wait for 2" in decision.reasons["prefill"]


def test_missed_slos_add_one_worker_once_the_last_one_has_settled():
    day = Day()
    day.pass_s(60)
    day.answers(100, 2)
    assert day.pass_s(INTERVAL_S) == [], "few enough"
    day.answers(200, 30)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3}]
    day.prefill = day.prefill._replace(coming=1)
    day.answers(300, 100)
    assert day.pass_s(INTERVAL_S) == [], "it is being started"
    day.prefill = day.prefill._replace(workers=3, coming=0)
    day.answers(400, 200)
    assert day.pass_s(INTERVAL_S) == [], "its effect is not seen yet"


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        ({"rows": 160.0}, "rows each"),
        ({"rows": 100.0, "slo": 0.06}, "a token would take"),
        ({"kv_usage": 1.8}, "of their KV"),
    ],
)
def test_decode_workers_are_added_for_rows_time_per_token_and_kv(load, reason):
    day = Day(slo_tpot_s=load.pop("slo", inf))
    day.decode = day.decode._replace(**load)
    (decision, *_) = day.pass_s(INTERVAL_S)
    assert decision.targets == {"decode": 3} and reason in decision.reasons["decode"]
    day = Day(slo_tpot_s=day.slo_tpot_s)
    day.decode = day.decode._replace(**{name: value * 0.6 for name, value in load.items()})
    assert day.pass_s(100) == []


def test_fewer_workers_must_have_sufficed_for_a_while():
    day = Day(roles=("decode",))
    assert day.pass_s(290) == []
    assert targets(day.pass_s(10)) == [{"decode": 1}]
    day = Day(roles=("decode",))
    day.pass_s(200)
    day.decode = day.decode._replace(rows=60.0)
    day.pass_s(30)
    day.decode = day.decode._replace(rows=0.0)
    assert day.pass_s(290) == [], "two were needed a moment ago"
    assert {"decode": 1} in targets(day.pass_s(90))


def test_a_load_at_the_limit_does_not_oscillate():
    """One worker just holds it, but not with a margin, so the second one stays."""
    held = 0.9 * 64 - (0.9 * 64) ** 0.5
    for rows, decided in ((held, []), (held / 1.25, [{"decode": 1}])):
        day = Day(roles=("decode",))
        day.decode = day.decode._replace(rows=rows)
        assert targets(day.pass_s(300)) == decided
    day = Day(roles=("decode",), decode=RoleLoad(1, rows=held, costs=COSTS))
    assert day.pass_s(300) == []


def test_the_range_is_kept():
    day = Day(bounds=WorkerRange(2, 3))
    assert day.pass_s(900) == [], "two are the least"
    day.prefill = day.prefill._replace(backlog_s=500.0)
    day.decode = day.decode._replace(rows=1000.0)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3, "decode": 3}]


def test_without_free_nodes_a_role_that_can_spare_a_worker_gives_it():
    day = Day(room=0)
    day.decode = day.decode._replace(workers=3)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    (decision,) = day.pass_s(INTERVAL_S)
    assert (decision.targets, decision.changes_role) == ({}, ("decode", "prefill"))
    day = Day(room=0)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    day.decode = day.decode._replace(rows=110.0)
    assert day.pass_s(INTERVAL_S) == [], "nobody can spare one"
    day = Day(room=1)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3}], "as many as there is room for"


def test_a_role_that_would_soon_need_its_worker_keeps_it():
    day = Day(room=0)
    day.decode = day.decode._replace(workers=3, rows=104.0)  # two suffice, but not with a margin
    day.prefill = day.prefill._replace(backlog_s=30.0)
    assert day.pass_s(INTERVAL_S) == []


def test_each_role_has_its_own_pause_after_a_change():
    day = Day()
    day.prefill = day.prefill._replace(backlog_s=1000.0)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3}]
    day.prefill = day.prefill._replace(workers=3)
    day.decode = day.decode._replace(backlog_s=1000.0)
    assert targets(day.pass_s(INTERVAL_S)) == [{"decode": 3}]
    day.decode = day.decode._replace(workers=3, backlog_s=0.0)
    assert day.pass_s(20) == [], "what the third prefill worker does is not seen yet"
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 4}]


def test_a_worker_added_for_a_queue_stays_for_a_while():
    day = Day(roles=("prefill",))
    assert day.pass_s(400, rate=1.2) == []
    day.prefill = day.prefill._replace(backlog_s=30.0)
    assert targets(day.pass_s(INTERVAL_S, rate=1.2)) == [{"prefill": 3}]
    day.prefill = day.prefill._replace(workers=3, backlog_s=0.0)
    assert day.pass_s(290, rate=1.2) == []
    assert targets(day.pass_s(60, rate=1.2))[:1] == [{"prefill": 2}]


def test_roles_share_the_remaining_room():
    day = Day(room=1)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    day.decode = day.decode._replace(rows=110.0)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3}], "a launcher refuses more as a whole"


def test_old_demand_is_forgotten():
    day = Day(prefill=RoleLoad(3, costs=COSTS), roles=("prefill",))
    assert day.pass_s(900, rate=2.0) == [], "three are needed"
    assert day.pass_s(100) == [], "on average, they still are"
    assert {"prefill": 1} in targets(day.pass_s(1200))


def test_prompts_of_very_different_lengths_need_more_workers():
    def with_spread(longest: float) -> Day:
        day = Day(roles=("prefill",), slo_ttft_s=6.0)
        for _ in range(60):
            for prompt_s in (2 - longest, longest):
                day.pass_s(INTERVAL_S, rate=1.2, prompt_s=prompt_s)
        return day

    assert with_spread(1.0).pass_s(INTERVAL_S) == []
    assert len(with_spread(1.9).state.changed_at) == 1


def test_long_prompts_must_be_in_time_too():
    """A worker busy half of its time computes the mean prompt in time, and not one three times as long."""
    load = OfferedLoad(prompts=0.5, prompt_s=1.0, spread=1.8, rows=0.0, context=0.0, kv_usage=0.0)
    facts = ScalingFacts(0.0, {"prefill": RoleLoad(1, costs=COSTS)}, {}, slo_ttft_s=12.0)
    assert needed(load, facts, "prefill", WorkerRange(1, 8))[0] == 2
    assert needed(load._replace(prompt_s=0.5), facts, "prefill", WorkerRange(1, 8))[0] == 1


def test_without_an_slo_workers_may_be_busy_four_fifths_of_the_time():
    for rate, decided in ((1.4, []), (1.8, [{"prefill": 3}])):
        day = Day(slo_ttft_s=inf, roles=("prefill",))
        assert targets(day.pass_s(60, rate=rate))[:1] == decided


def test_without_an_slo_prompts_may_wait_for_five_seconds():
    for backlog_s, decided in ((9.9, []), (10.1, [{"prefill": 3}])):
        day = Day(slo_ttft_s=inf, roles=("prefill",))
        day.prefill = day.prefill._replace(backlog_s=backlog_s)
        assert targets(day.pass_s(INTERVAL_S)) == decided


def test_a_queue_brings_a_quarter_more_workers_at_a_time():
    day = Day(prefill=RoleLoad(8, costs=COSTS, backlog_s=1000.0), roles=("prefill",))
    day.bounds = WorkerRange(1, 50)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 10}]
    day.prefill = day.prefill._replace(workers=10)
    assert day.pass_s(25) == [], "what they do is not seen yet"
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 13}]
    day.prefill = day.prefill._replace(workers=50, backlog_s=1e6)
    assert day.pass_s(60) == [], "there are to be no more"


def test_one_miss_is_ignored_and_so_are_misses_before_the_last_change():
    day = Day(roles=("prefill",))
    day.pass_s(60)
    day.answers(1, 1)
    assert day.pass_s(INTERVAL_S) == []
    day.answers(2, 2)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 3}]
    day.prefill = day.prefill._replace(workers=3)
    assert day.pass_s(120) == [], "nobody has missed it since"
    day.answers(4, 4)
    assert targets(day.pass_s(INTERVAL_S)) == [{"prefill": 4}]


def test_misses_are_judged_for_five_minutes():
    day = Day(roles=("prefill",), bounds=WorkerRange(2, 2))
    day.pass_s(60)
    day.answers(10, 10)
    assert day.pass_s(60) == [], "no more are allowed"
    day.bounds = WorkerRange(2, 8)
    assert day.pass_s(INTERVAL_S) != []
    late = Day(roles=("prefill",), bounds=WorkerRange(2, 2))
    late.pass_s(60)
    late.answers(10, 10)
    late.pass_s(310)
    late.bounds = WorkerRange(2, 8)
    assert late.pass_s(INTERVAL_S) == []


def test_draft_workers_and_the_last_worker_keep_their_role():
    day = Day(room=0, roles=("draft", "prefill"))
    day.decode = RoleLoad(3, costs=COSTS)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    assert day.pass_s(INTERVAL_S) == [], "it is another model"
    day = Day(room=0, bounds=WorkerRange(3, 8))
    day.decode = day.decode._replace(workers=3)
    day.prefill = day.prefill._replace(workers=3, backlog_s=50.0)
    assert day.pass_s(INTERVAL_S) == [], "three are to stay"


def test_after_a_change_of_role_both_roles_pause():
    day = Day(room=0)
    day.decode = day.decode._replace(workers=4)
    day.prefill = day.prefill._replace(backlog_s=30.0)
    assert day.pass_s(INTERVAL_S)[0].changes_role == ("decode", "prefill")
    day.decode = day.decode._replace(workers=3)
    day.prefill = day.prefill._replace(workers=3)
    assert day.pass_s(25) == []
    assert day.pass_s(INTERVAL_S)[0].changes_role == ("decode", "prefill")


def test_a_restarted_routers_counters_are_no_demand():
    assert RoleDemand(prompts=3, prompt_s=1.0) - RoleDemand(prompts=10, prompt_s=5.0) == RoleDemand()


@pytest.fixture
def often(monkeypatch):
    """Make routers decide often and give up soon."""
    monkeypatch.setattr("router.scaling.scaler.INTERVAL_S", 0.05)
    monkeypatch.setattr("router.scaling.scaler.GRACE_S", 0.0)


def test_a_router_has_its_decisions_carried_out_and_shows_them(make_router, pool, often):
    """The worker reports that each token of the prompt takes seconds."""
    router = make_router(autoscale={"decode": WorkerRange(1, 4)})
    asked = []

    def scale(request):
        asked.append(dict(request.targets))
        return ScaleAnswer()

    router.server.on_scale(scale)
    worker = router.add_worker("decode-0", costs=StepCosts(token_s=10.0))
    router.server.expect({"decode-0": "decode"}, {"decode": 3})
    eventually(lambda: router.server.state.autoscaler._state.samples)
    worker.hold.set()
    answer = pool.submit(post, router, max_tokens=3)
    eventually(lambda: asked)
    worker.hold.clear()
    assert answer.result(20).status_code == 200
    assert asked[0] == {"decode": 4}, "there is far more to do than one does"
    newest = router.http.get("/decisions").json()["scaling"][-1]
    assert (newest["targets"], newest["had"], newest["changes_role"]) == (asked[0], {"decode": 1}, None)
    assert newest["reasons"]["decode"]
    assert router.metric("tandem_scaling_decisions_total", role="decode", direction="up") >= 1
    assert router.metric("tandem_workers_wanted", role="decode") >= 2
    assert router.server.state.placer.meter.demand["decode"].prompts == 1


def test_a_failed_decision_is_reported(make_router, often):
    router = make_router(autoscale={"decode": WorkerRange(1, 2)})

    def scale(request):
        router.server.gave_up("decode-1", "there is no room for decode-1 after 3 s (--scale-timeout)")
        return ScaleAnswer(started=["decode-1"])

    router.server.on_scale(scale)
    router.add_worker("decode-0", costs=StepCosts(token_s=10.0))
    router.server.expect({"decode-0": "decode"}, {"decode": 1})
    eventually(lambda: router.server.state.autoscaler._state.samples)
    assert post(router, max_tokens=3).status_code == 200
    eventually(lambda: router.metric("tandem_scaling_failures_total"))
    failure = router.http.get("/decisions").json()["scaling"][-1]["failure"]
    assert "decode-1: there is no room for decode-1 after 3 s (--scale-timeout)" in failure
    assert failure.endswith("What runs goes on: 1 decode")
    assert post(router, max_tokens=3).status_code == 200


def test_nothing_is_decided_during_a_restart(make_router, often, pool):
    router = make_router(autoscale={"decode": WorkerRange(1, 2)})
    router.add_worker("decode-0")
    autoscaler, changes = router.server.state.autoscaler, router.server.state.turns.changes
    eventually(lambda: autoscaler._state.samples)
    router.server.on_scale(lambda request: ScaleAnswer(started=["decode-1"]))
    restart = pool.submit(router.http.post, "/restart", json={})
    eventually(lambda: changes.under_way == ["restart"])
    eventually(lambda: autoscaler._due < time.monotonic() - 0.2)
    router.server.gave_up("decode-1", "there is no room")
    assert restart.result(20).status_code == 503, "its successor does not come"
    eventually(lambda: autoscaler._due > time.monotonic())


def test_a_worker_between_two_roles_is_waited_for(make_router, often):
    """During the change it counts for neither role, and both would seem to lack a worker."""
    router = make_router(autoscale=dict.fromkeys(("prefill", "decode"), WorkerRange(1, 3)), start_timeout=3.0)
    decodes = {f"decode-{index}": router.add_worker(f"decode-{index}") for index in range(3)}
    router.add_worker("prefill-0", "prefill", peers=decodes, costs=StepCosts(token_s=10.0))
    router.server.expect({name: name.partition("-")[0] for name in (*decodes, "prefill-0")})
    autoscaler = router.server.state.autoscaler
    eventually(lambda: autoscaler._state.samples)
    assert post(router, max_tokens=3).status_code == 200
    eventually(lambda: any(worker.has_left.is_set() for worker in decodes.values()))
    eventually(lambda: autoscaler._due < time.monotonic() - 0.2)
    (event,) = router.http.get("/decisions").json()["scaling"]
    assert (event["changes_role"], event["failure"]) == ({"from": "decode", "to": "prefill"}, None)
    (changed,) = (name for name, worker in decodes.items() if worker.has_left.is_set())
    router.kill(decodes[changed])
    router.add_worker(changed, "prefill", peers=decodes)
    eventually(lambda: len(autoscaler.log.latest()) == 2)
    eventually(lambda: autoscaler.log.latest()[0].failure is not None)
    assert "it was not ready within 3 s, as a prefill worker" in autoscaler.log.latest()[0].failure
    assert autoscaler.log.latest()[1].failure is None
    assert sum(worker.has_left.is_set() for worker in decodes.values()) == 2


def test_misses_that_more_workers_would_not_help_do_not_count(make_router):
    router = make_router()
    router.add_worker("decode-0")
    eventually(lambda: router.server.state.registry.live())
    (worker,) = router.server.state.registry.live()
    meter = DemandMeter()
    meter.answered(Assignment(worker, worker, num_tokens=10_000, num_uncached=10_000), 5.0, 0.5)
    assert meter.demand == {}
    meter.answered(Assignment(worker, worker, num_tokens=10, num_uncached=10), 5.0, 0.5)
    meter.refused(Refusal("too late", "slo_tpot", waiting_helps=False), [worker])
    meter.refused(Refusal("too late", "slo_ttft", waiting_helps=True), [worker])
    assert (meter.demand["decode"].judged, meter.demand["decode"].missed) == (2, 2)
