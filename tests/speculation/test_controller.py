"""The controller on a simulated server is close to the best fixed K, and never below no speculation."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from costs.drafting import Explorer
from costs.widths import DRAFT_START, DRAFT_TOKEN, MeasuredCurve, TargetTime
from speculation.control.controller import (
    DRAFT_PLAN_STEPS,
    IDLE_PLAN_STEPS,
    PLAIN_PLAN_STEPS,
    TRIAL_STEPS,
    DraftController,
    PlannedStep,
    plain_and_best,
)
from speculation.control.estimator import Shape, SpeculatingRequest
from tests.speculation.simulated import PROFILES, Profile, Rate, SimulatedServer, flat_seconds, target_seconds

SECONDS = {1: 2.0, 2: 3.0, 4: 6.0, 8: 4.0, 16: 4.0, 64: 6.0}
NGRAM = PROFILES[1]


def fixed_rates(
    patch: pytest.MonkeyPatch, num_requests: int, profile: Profile, **options: Any
) -> list[float]:
    """Return the tokens per second of each fixed number of drafts, the first without drafts."""
    numbers = (0, profile.whole) if profile.whole else (0, 2, min(6, profile.max_tokens))
    rates = []
    for fixed in numbers:
        server = SimulatedServer(patch, num_requests, profile, fixed=fixed, **options)
        server.run(SECONDS[num_requests] / 2)
        rates.append(server.run(SECONDS[num_requests]))
    return rates


def auto_rate(patch: pytest.MonkeyPatch, num_requests: int, profile: Profile, **options: Any) -> float:
    """Return the tokens per second with "auto" over the same time."""
    server = SimulatedServer(patch, num_requests, profile, **options)
    server.run(SECONDS[num_requests] / 2)
    return server.run(SECONDS[num_requests])


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.method)
def test_it_is_close_to_the_best_number_and_never_below_none(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 1 to 64 requests, after the first few. The end of a run changes the rate by up to 3 %."""
    ratios = []
    for num_requests in SECONDS:
        plain, *drafting = fixed_rates(monkeypatch, num_requests, profile)
        auto = auto_rate(monkeypatch, num_requests, profile)
        assert auto >= 0.95 * plain, num_requests
        ratios.append(auto / max(plain, *drafting))
    assert min(ratios) >= 0.92
    assert statistics.fmean(ratios) >= 0.97, ratios


@pytest.mark.parametrize("num_requests", [1, 16])
def test_free_rows_are_used(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = fixed_rates(monkeypatch, num_requests, PROFILES[0], target=flat_seconds)
    auto = auto_rate(monkeypatch, num_requests, PROFILES[0], target=flat_seconds)
    assert auto >= 0.95 * max(rates) > 1.2 * rates[0]


@pytest.mark.parametrize(
    ("num_requests", "wrong", "bent"), [(1, 2.5, 0.0), (16, 0.4, 0.0), (2, 1.0, -0.07), (2, 1.0, 0.07)]
)
def test_a_wrong_calibration_is_corrected(
    num_requests: int, wrong: float, bent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was busy, or many rows were measured worse than few."""

    def calibrated(rows: int) -> float:
        return wrong * target_seconds(1, rows) * (1 + bent * rows.bit_length())

    rates = fixed_rates(monkeypatch, num_requests, NGRAM)
    server = SimulatedServer(monkeypatch, num_requests, NGRAM, calibrated=calibrated)
    server.run(SECONDS[num_requests])
    assert server.run(SECONDS[num_requests]) >= 0.95 * max(rates)


@pytest.mark.parametrize("num_requests", [4, 16])
def test_requests_with_different_text(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them copy text, the other half drafts in vain."""
    rate: Rate = lambda number, place: 0.95 if number % 2 else 0.1  # noqa: E731
    rates = fixed_rates(monkeypatch, num_requests, PROFILES[0], rate=rate)
    assert auto_rate(monkeypatch, num_requests, PROFILES[0], rate=rate) >= 0.96 * max(rates)


def test_drafting_resumes_when_text_becomes_predictable(monkeypatch: pytest.MonkeyPatch) -> None:
    predictable = False
    server = SimulatedServer(
        monkeypatch, 1, NGRAM, rate=lambda number, place: 0.95 if predictable else 0.05, output_tokens=100_000
    )
    server.run(4.0)
    before = server.run(1.0)
    predictable = True
    server.run(4.0)
    assert server.run(1.0) > 1.3 * before


@pytest.mark.parametrize(("profile", "num_requests"), list(zip(PROFILES, [1, 16] * 3, strict=True)))
def test_drafts_that_never_pay_cost_little(
    profile: Profile, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of trials, of prompts read for them, and of plans together."""
    options: dict[str, Any] = {"rate": lambda number, place: 0.05, "output_tokens": 128}
    plain = SimulatedServer(monkeypatch, num_requests, profile, fixed=0, **options)
    auto = SimulatedServer(monkeypatch, num_requests, profile, **options)
    auto.run(1.0)
    assert auto.run(6.0) >= 0.98 * plain.run(6.0)


def test_texts_that_are_slow_to_read_are_seldom_read_for_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(PROFILES[0], per_read=2e-5)
    plain, auto = (
        SimulatedServer(
            monkeypatch, 16, slow, rate=lambda number, place: 0.05, output_tokens=1000, fixed=fixed
        )
        for fixed in (0, None)
    )
    plain.run(6.0)
    auto.run(6.0)
    assert auto.run(18.0) >= 0.98 * plain.run(18.0)


def test_a_pause_while_drafting_does_not_stop_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimulatedServer(
        monkeypatch,
        1,
        PROFILES[0],
        rate=lambda number, place: 0.9,
        output_tokens=100_000,
        target=flat_seconds,
    )
    server.run(4.0)
    before = server.run(4.0)
    known = server.controller.estimator.methods["draft_model"].time
    known.observe(1, levels=4, tokens=4, measured=1.0)
    assert server.run(4.0) > 0.9 * before


def test_drafts_that_are_rarely_found_are_searched_for_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rare = replace(NGRAM, share=0.05, start=0.0, per_token=1e-7)
    server = SimulatedServer(
        monkeypatch, 8, rare, rate=lambda number, place: 0.95, target=flat_seconds, output_tokens=100_000
    )
    server.run(4.0)
    looked = []
    for _ in range(600):
        server.step()
        looked += [granted > 0 for granted in server.chosen]
    assert statistics.fmean(looked) > 0.7


def test_the_controller_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[list[int]]] = []
    for _ in range(2):
        server = SimulatedServer(monkeypatch, 4, NGRAM)
        chosen.append([])
        for _ in range(400):
            server.step()
            chosen[-1].append(server.chosen)
    assert chosen[0] == chosen[1]


def test_unused_trial_time_is_saved_for_one_trial_only() -> None:
    explorer = Explorer(0.01)
    explorer.passed(1000.0)
    assert explorer.tries(1.0) and not explorer.tries(1.0)
    explorer.passed(50.0)
    assert not explorer.tries(1.0)
    explorer.passed(60.0)
    assert explorer.tries(1.0)


# --- one plan after the other -------------------------------------------------------------------------


def controller(row_seconds: float = 0.0, reads_prompts: bool = False) -> DraftController:
    """Make a controller. A step of any batch takes 10 ms, and `row_seconds` more for each row."""
    made = DraftController(64, 8, trial_share=0.0)
    made.estimator.add_method("eagle", Shape(8), 8, reads_text=reads_prompts, reads_prompts=reads_prompts)
    curve = MeasuredCurve((1, 1024), (1e-2 + row_seconds, 1e-2 + 1024 * row_seconds))
    made.estimator.target = TargetTime(curve)
    return made


def requests(made: DraftController, count: int, fixed: int | None = None) -> list[SpeculatingRequest]:
    return [made.estimator.new_request("eagle", fixed) for _ in range(count)]


def plan_steps(made: DraftController, asked: list[SpeculatingRequest]) -> int:
    """Return the number of steps from one plan to the next."""
    made.begin_step(len(asked))
    made.plan(asked)
    steps = 1
    while not made.begin_step(len(asked)):
        steps += 1
    return steps


def test_a_plan_with_fewer_drafts_lasts_longer() -> None:
    drafting, idle = controller(row_seconds=1e-3), controller(row_seconds=1.0)
    assert plan_steps(drafting, requests(drafting, 2)) == DRAFT_PLAN_STEPS
    assert drafting.drafts and drafting.reads_steps
    assert plan_steps(idle, requests(idle, 2)) == IDLE_PLAN_STEPS
    assert not idle.drafts
    hard = requests(drafting, 2)
    for request in hard:
        for _ in range(6):
            request.acceptance.observe(8, 0, 0)
    assert plan_steps(drafting, hard) == PLAIN_PLAN_STEPS
    assert plan_steps(drafting, requests(drafting, 2, fixed=3)) == IDLE_PLAN_STEPS


def test_new_requests_are_planned_for_and_ended_ones_are_not() -> None:
    made = controller()
    asked = requests(made, 3)
    assert made.begin_step(3)
    made.plan(asked)
    assert not made.begin_step(3)
    assert not made.begin_step(2)
    assert made.begin_step(3)
    made.plan(asked)
    assert made.begin_step(3, 1), "requests to come count"


def test_a_plan_without_drafts_outlasts_changes_of_the_batch() -> None:
    made = controller(row_seconds=1.0)
    asked = requests(made, 3)
    for size in (1, 3):
        assert made.begin_step(size)
        made.plan(asked[:size])
    for size in (1, 2, 3):
        made.join(asked[0], is_read=False)
        assert not made.begin_step(size)
    assert made.begin_step(4), "nothing is known of so many"
    made.plan(requests(made, 4))
    made.join(requests(made, 1, fixed=3)[0], is_read=False)
    assert made.begin_step(4)
    made.plan(requests(made, 4))
    made.join(asked[0], is_read=True)
    assert made.begin_step(4)


def test_fixed_numbers_are_planned_for_once_they_decode() -> None:
    """Drafts do not pay here. Another such request decodes while this one's prompt is computed."""
    made = controller(row_seconds=1.0)
    for size in (1, 2):
        assert made.begin_step(size)
        made.plan(requests(made, size))
    first, second = requests(made, 2, fixed=3)
    made.join(first, is_read=False)
    assert not made.begin_step(0, 1)
    made.join(second, is_read=False)
    assert made.begin_step(1, 1)
    made.plan([first])
    assert not made.begin_step(1, 1)
    assert made.begin_step(2)
    made.plan([first, second])
    assert second.granted == 3
    assert not made.begin_step(2)
    assert not made.begin_step(1)


def test_queued_requests_count_as_running() -> None:
    made = controller(row_seconds=1e-3)
    asked = requests(made, 1)
    for num_to_come, drafts in ((0, True), (63, False), (0, True)):
        assert made.begin_step(1, num_to_come)
        made.plan(asked)
        assert made.drafts == drafts
    assert not made.begin_step(0, 1), "nobody decodes"


def test_steps_go_ahead_only_under_a_plan_without_drafts() -> None:
    idle, drafting = controller(row_seconds=1.0), controller()
    for made in (idle, drafting):
        assert not made.may_go_ahead(1, 0, reads_hidden=False), "there is no plan yet"
        made.begin_step(1)
        made.plan(requests(made, 1))
    assert not drafting.may_go_ahead(1, 0, reads_hidden=False)
    assert not idle.may_go_ahead(4, 0, reads_hidden=False), "nothing is known of so many"
    for reads_hidden, steps in ((True, IDLE_PLAN_STEPS - 2), (False, 1)):
        ahead = 0
        while idle.may_go_ahead(1, 0, reads_hidden=reads_hidden):
            idle.went_ahead(1, 0)
            ahead += 1
        assert ahead == steps, "the next plan may need the hidden states of the last step"


@pytest.mark.parametrize(
    ("reads_prompts", "is_blind"),
    [(False, False), (True, False), (True, True)],
    ids=["any", "read", "unread"],
)
def test_a_trial_costs_what_its_slower_steps_lose(
    reads_prompts: bool, is_blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none if all prompts are unread by a method that needs them."""
    made, prices = controller(row_seconds=0.1, reads_prompts=reads_prompts), list[float]()
    monkeypatch.setattr(made._explorer, "tries", prices.append)
    (asked,) = requests(made, 1)
    asked.is_blind = is_blind
    plain, best = plain_and_best(made.estimator, "eagle", [asked], PlannedStep(1, 1))
    assert best.rate < plain.rate
    made.begin_step(1)
    made.plan([asked])
    price = TRIAL_STEPS * best.seconds * (1 - best.rate / plain.rate)
    assert prices == ([] if is_blind else [pytest.approx(price)])


def test_fixed_numbers_are_never_changed() -> None:
    made = controller(row_seconds=1.0)
    asked = requests(made, 2, fixed=5) + requests(made, 1, fixed=0) + requests(made, 1)
    asked.append(SpeculatingRequest(None, 0, made.estimator.new_request(None, 0).acceptance))
    made.begin_step(5)
    made.plan(asked)
    assert [request.granted for request in asked] == [5, 5, 0, 0, 0]
    (state,) = made.estimator.report(8).methods
    assert (state.num_requests, state.num_tokens) == (4, 10)


def test_the_routers_table_is_the_model() -> None:
    made = controller(row_seconds=1e-3)
    made.estimator.target.observe(8, 16, 1.0)
    table = made.estimator.report(8).step_time
    assert (table.sequences, table.drafted) == ([1, 2, 4, 8, 16, 32, 64], [0, 1, 2, 4, 8])
    for count, seconds in zip(table.sequences, table.seconds, strict=True):
        assert (
            seconds
            == made.estimator.target.seconds(count, [0, count, 2 * count, 4 * count, 8 * count]).tolist()
        )


@pytest.mark.parametrize(
    ("per_read", "output", "reads"), [(1e-6, 128, True), (1e-3, 128, False), (1e-3, 100_000, True)]
)
def test_prompts_are_read_if_drafts_save_more_than_reading_takes(
    per_read: float, output: int, reads: bool
) -> None:
    made = controller(reads_prompts=True)
    made.estimator.methods["eagle"].time.per_read = per_read
    for _ in range(200):
        made.estimator.ended(300, output)
    made.begin_step(0, 4)
    made._steps_left = 3
    assert made.reads_prompts("eagle", 300) == reads
    assert (made._steps_left == 0) == reads, "what reads is planned for at once"


def test_only_requests_with_read_prompts_have_their_steps_read() -> None:
    made = controller(row_seconds=1.0, reads_prompts=True)
    asked = requests(made, 2)
    asked[0].is_blind = True
    for sees in (True, False):
        made.begin_step(2)
        made.plan(asked)
        made.begin_step(2)
        assert made.reads_steps == sees
        asked[1].is_blind = True
        made._steps_left = 0


def test_disturbed_steps_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr("speculation.control.estimator.time.perf_counter", lambda: float(next(now)))
    for disturbs in (True, False):
        made = controller(row_seconds=1.0)
        before = made.estimator.target.seconds(1, [0])
        made.begin_step(1)
        made.plan(requests(made, 1))
        made.begin_step(1)
        if disturbs:
            made.estimator.disturb()
        made.end_window()
        assert (made.estimator.target.seconds(1, [0]) == before) == disturbs


def test_steps_without_decoding_are_not_learned_from() -> None:
    """A prompt of one token disturbs nothing else: once before a lasting plan, and once after one."""
    made = controller(row_seconds=1.0)
    made.begin_step(1)
    made.plan(requests(made, 1))
    for _ in range(2):
        made.begin_step(0)
        assert made.estimator.window is None
    assert not made.begin_step(1)
    made.begin_step(0, 1)
    made.begin_step(1)
    made.plan(requests(made, 1))


def test_drafting_and_reading_are_timed_apart() -> None:
    made = controller(reads_prompts=True)
    known, (request,) = made.estimator.methods["eagle"].time, requests(made, 1)
    made.estimator.drafted("eagle", [request], [4], known.units(4, 4) * 1e-3)
    assert known.unit(1) == pytest.approx(1e-3) and known.per_read is None, (
        "a new request has nothing to read"
    )
    request.unread = 100
    made.estimator.drafted("eagle", [request], [4], known.units(4, 4) * 1e-3 + 0.2)
    assert (known.unit(1), known.per_read) == pytest.approx((1e-3, 2e-3))
    made.estimator.drafted("eagle", [request], [4], known.units(4, 4) * 1.5e-3)
    assert (known.unit(1), known.per_read) == pytest.approx((1.05e-3, 2e-3)), "its text has been read"


def test_a_tree_takes_one_level_of_drafting() -> None:
    made = controller()
    made.estimator.add_method("medusa", Shape(24, whole=True), 8, reads_text=False, reads_prompts=False)
    known, request = made.estimator.methods["medusa"].time, made.estimator.new_request("medusa", None)
    made.estimator.drafted("medusa", [request], [24], known.units(1, 24) * 1e-3)
    assert known.unit(1) == pytest.approx(1e-3)


def test_a_report_tells_what_drafting_takes() -> None:
    made = controller(reads_prompts=True)
    known = made.estimator.methods["eagle"]
    known.time.observe(1, 4, 4, known.time.units(4, 4) * 1e-3)
    known.time.observe(16, 4, 4, known.time.units(4, 4) * 3e-3)
    known.time.observe_reading(100, 0.2)
    for count, unit in ((0, 1e-3), (16, 3e-3)):
        known.num_requests = count
        (state,) = made.estimator.report(8).methods
        told = state.level_s, state.start_s, state.token_s, state.read_s
        assert told == pytest.approx((unit, unit * DRAFT_START, unit * DRAFT_TOKEN, 2e-3))


@pytest.mark.parametrize("count", [1, 8])
def test_a_drafts_reading_time_is_not_charged_to_steps(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("speculation.control.estimator.time.perf_counter", lambda: clock)
    made = controller()
    (request,) = asked = requests(made, 1, fixed=1)
    beside = float(made.estimator.target.seconds(1, [1])[0])
    made.begin_step(1)
    made.plan(asked)
    for step in range(count):
        drafting = beside if step == 0 else beside / 10
        made.estimator.drafted("eagle", asked, [1], drafting)
        clock += drafting + beside
        made.estimator.verified(request, 1, 1)
        if step < count - 1:
            assert not made.begin_step(1)
    made.end_window()
    assert float(made.estimator.target.seconds(1, [1])[0]) == pytest.approx(beside)
