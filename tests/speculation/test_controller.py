"""The controller in a simulated engine: as fast as the best fixed K, never slower than without drafts."""

from __future__ import annotations

import itertools

import pytest

from protocol.speculation import Method
from speculation.control.acceptance import Acceptance, MethodAcceptance
from speculation.control.controller import FIRST_DRAFTS, Controller, MethodControl
from speculation.control.plan import Request, Shape
from speculation.control.step_time import DraftTime, DraftTimes, TargetTime, TargetTimes
from tests.speculation.simulated import (
    MAX_TOKENS,
    Rate,
    SimulatedEngine,
    flat_seconds,
    target_seconds,
)

RATES: dict[str, Rate] = {
    "high": lambda number, place: 0.85,
    "medium": lambda number, place: 0.55,
    "hopeless": lambda number, place: 0.1,
    "unlike": lambda number, place: 0.9 if number % 2 else 0.15,
    "changing": lambda number, place: 0.9 if place // 75 % 2 else 0.1,
    "hard at first": lambda number, place: 0.95 if place > 40 else 0.1,
}
STEPS = {1: 2000, 4: 1000, 16: 400, 64: 150}
FIXED = (0, 1, 2, 3, 4, 6, 8)


def fastest_fixed(num_requests: int, rate: Rate, **fields: object) -> tuple[float, float]:
    """Tokens a second without drafts, and with the best fixed number of them."""
    rates = [
        SimulatedEngine(num_requests, rate, fixed=fixed, **fields).run(STEPS[num_requests] // 2)  # type: ignore[arg-type]
        for fixed in FIXED
    ]
    return rates[0], max(rates)


@pytest.mark.parametrize("num_requests", STEPS)
@pytest.mark.parametrize("name", RATES)
def test_never_below_no_drafts_and_close_to_the_best_fixed_number(name: str, num_requests: int) -> None:
    plain, best = fastest_fixed(num_requests, RATES[name])
    auto = SimulatedEngine(num_requests, RATES[name]).run(STEPS[num_requests])
    assert auto >= 0.97 * plain
    assert auto >= 0.95 * best


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_rows_that_cost_nothing_are_used(num_requests: int) -> None:
    cheap = DraftTimes(per_level=2e-4)
    plain, best = fastest_fixed(num_requests, RATES["high"], target=flat_seconds, draft=cheap)
    auto = SimulatedEngine(num_requests, RATES["high"], target=flat_seconds, draft=cheap)
    assert auto.run(STEPS[num_requests]) >= 0.95 * best
    assert best > 1.2 * plain


@pytest.mark.parametrize("wrong", [0.4, 2.5])
@pytest.mark.parametrize("num_requests", [1, 16])
def test_a_machine_that_was_busy_at_calibration(num_requests: int, wrong: float) -> None:
    plain, best = fastest_fixed(num_requests, RATES["high"])
    engine = SimulatedEngine(
        num_requests, RATES["high"], calibrated=lambda rows: wrong * target_seconds(rows)
    )
    engine.run(STEPS[num_requests] // 4)
    auto = engine.run(STEPS[num_requests])
    assert auto >= 0.97 * plain
    assert auto >= 0.95 * best


@pytest.mark.parametrize("bent", [-0.07, 0.07])
def test_a_calibration_of_the_wrong_shape_is_mended(bent: float) -> None:
    def calibrated(rows: int) -> float:
        return target_seconds(rows) * (1 + bent * rows.bit_length())

    plain, best = fastest_fixed(4, RATES["high"])
    engine = SimulatedEngine(4, RATES["high"], calibrated=calibrated)
    engine.run(500)
    auto = engine.run(1000)
    assert auto >= 0.97 * plain
    assert auto >= 0.95 * best


def test_what_is_not_found_is_not_paid_for() -> None:
    """A method that only now and then finds something, and is then right, goes on looking everywhere."""
    nearly_free = DraftTimes(per_token=1e-6)
    engine = SimulatedEngine(16, lambda number, place: 0.95, draft=nearly_free, share=0.05)
    engine.run(600)
    looked = []
    for _ in range(400):
        engine.step()
        looked += [chosen > 0 for chosen in engine.chosen]
    assert sum(looked) > 0.9 * len(looked)


def test_only_what_is_found_fills_a_step() -> None:
    """Where rows are free up to a limit, rarely found drafts of many requests stay below it."""
    rare = {"draft": DraftTimes(per_token=1e-6), "target": flat_seconds, "share": 0.1}
    plain, best = fastest_fixed(64, RATES["high"], **rare)
    engine = SimulatedEngine(64, RATES["high"], **rare)  # type: ignore[arg-type]
    engine.run(150)
    assert engine.run(150) >= 0.95 * best > plain


def test_drafting_resumes_where_text_becomes_predictable() -> None:
    predictable = False
    engine = SimulatedEngine(1, lambda number, place: 0.95 if predictable else 0.05)
    engine.run(1500)
    before = engine.run(300)
    predictable = True
    engine.run(400)
    assert engine.run(300) > 1.3 * before


def test_trials_cost_well_below_a_percent() -> None:
    for num_requests in (1, 16):
        plain = SimulatedEngine(num_requests, RATES["hopeless"], fixed=0).run(200)
        engine = SimulatedEngine(num_requests, RATES["hopeless"], noise=0.0, outliers=0.0)
        engine.method.num_first = FIRST_DRAFTS
        engine.run(300)
        assert engine.run(1500) >= 0.992 * plain


def test_every_request_is_tried_again_and_again() -> None:
    engine = SimulatedEngine(8, RATES["hopeless"], output_tokens=10_000)
    engine.run(500)
    for _ in range(2):
        tried = set()
        for _ in range(1500):
            engine.step()
            tried |= {index for index, chosen in enumerate(engine.chosen) if chosen}
        assert len(tried) == 8


# --- one decision ---------------------------------------------------------------------------------


def controller(row_seconds: float = 1e-5, draft: DraftTimes | None = None, **shapes: Shape) -> Controller:
    times = TargetTimes((1, 1024), (1e-2 + row_seconds, 1e-2 + 1024 * row_seconds))
    made = Controller(TargetTime(times, 1024), 64)
    methods: dict[str, Shape] = shapes or {"draft_model": Shape(MAX_TOKENS)}
    for name, shape in methods.items():
        time = DraftTime(draft or DraftTimes(per_level=1e-5))
        method: Method = name  # type: ignore[assignment]
        depth = min(shape.max_tokens, MAX_TOKENS)
        made.methods[method] = MethodControl(shape, MethodAcceptance(depth), time, num_first=FIRST_DRAFTS)
    return made


def request(made: Controller, fixed: int | None = None, method: Method = "draft_model") -> Request:
    return Request(method, fixed, Acceptance(made.methods[method].acceptance))


def disabled() -> Request:
    return Request(None, 0, Acceptance(MethodAcceptance(0)))


def show(one: Request, rounds: int, num_drafted: int, num_accepted: int) -> None:
    for place in range(rounds):
        one.acceptance.observe(num_drafted, num_accepted, place)


def test_a_methods_first_drafts_are_made_whatever_they_seem_to_lose() -> None:
    made = controller(row_seconds=1.0)
    made.methods["draft_model"].num_first = 0
    requests = [request(made) for _ in range(6)]
    made_at = []
    for place in range(200):
        for one in requests:
            one.place = place
        before = sum(one.num_first for one in requests)
        if made.is_due(len(requests)):
            made.choose(requests, 100.0)
        if place == 0:  # the latest ones' prompts were read if any were
            assert [one.chosen for one in requests] == [0, 0, 4, 4, 4, 4]
        made_at += [place] * (sum(one.num_first for one in requests) - before)
        assert made.reads_prompts or len(made_at) >= FIRST_DRAFTS
    assert FIRST_DRAFTS <= len(made_at) < FIRST_DRAFTS + 4
    assert made_at[-1] >= 80, "how a text begins tells little of how it goes on"


def test_one_request_makes_but_a_quarter_of_the_first_drafts() -> None:
    made = controller(row_seconds=1.0)
    made.methods["draft_model"].num_first = 0
    for _ in range(5):
        one = request(made)
        drafted = 0
        for one.place in range(200):
            if made.is_due(1):
                made.choose([one], 100.0)
            drafted += one.chosen > 0
        assert one.num_first in (8, 0)
        assert drafted <= one.num_first + 1, "but for a trial"
    assert one.num_first == 0, "32 were made"


def test_what_hardly_ever_drafts_is_looked_at_again() -> None:
    made = controller(row_seconds=1.0)

    def serve() -> Request:
        one = request(made)
        made.expect(one)
        for one.place in range(200):
            if made.is_due(1):
                made.choose([one], 100.0)
        return one

    for _ in range(5):  # so many that drafts are known not to pay
        serve()
    again = [number for number in range(54) if serve().num_first]
    assert len(again) == 2
    assert again[1] - again[0] == 24


def test_prompts_are_not_looked_at_where_drafts_hardly_ever_pay() -> None:
    made = controller(row_seconds=1.0)
    assert not made.is_due(0, 6)
    assert not made.is_idle, "nothing is known yet"
    requests = [request(made) for _ in range(6)]
    for _ in range(12):
        made.is_due(6)
        made.choose(requests, 100.0)
    assert not made.is_due(0, 6)
    assert made.is_idle
    assert not made.is_due(0, 1)
    assert not made.is_idle, "of this load nothing is known"
    for _ in range(3):
        for one in requests:
            show(one, 30, MAX_TOKENS, MAX_TOKENS)
        made.target = controller().target
        made.is_due(6)
        made.choose(requests, 100.0)
    assert not made.is_due(0, 6)
    assert not made.is_idle


@pytest.mark.parametrize(
    ("per_read", "lengths", "reads"),
    [(1e-5, (300, 100), True), (1e-3, (300, 100), False), (1e-3, (3000, 10_000), True)],
)
def test_prompts_are_read_where_drafts_save_more_than_that_takes(
    per_read: float, lengths: tuple[int, int], reads: bool
) -> None:
    """A token takes 2.5 ms without drafts, and less than 1 ms with them."""
    made = controller(draft=DraftTimes(per_level=1e-5, per_read=per_read))
    made.methods["draft_model"].reads_prompts = True
    made.methods["draft_model"].least_gain = 0.03
    for _ in range(100):
        made.lengths.observe(*lengths)
    for _ in range(30):
        made.methods["draft_model"].acceptance.observe(MAX_TOKENS, 4)
    requests = [request(made) for _ in range(4)]
    assert made.reads_prompts, "nothing is known yet"
    reading, drafting = [], []
    for _ in range(40):
        made.is_due(4)
        made.choose(requests, 100.0)
        reading.append(made.reads_prompts)
        drafting.append(all(one.chosen for one in requests))
    assert reading[20:] == [reads] * 20
    assert sum(drafting[20:]) >= 10 if reads else sum(drafting[20:]) < 3  # but for trials


def test_prompts_are_read_for_what_they_would_bring_and_not_what_came_of_those_that_were_not() -> None:
    made = controller()
    made.methods["draft_model"].reads_prompts = True
    made.target = controller(row_seconds=2e-3).target
    requests = [request(made) for _ in range(4)]
    for one in requests:
        for place in range(30):
            one.acceptance.observe(MAX_TOKENS, 0, place, is_blind=True)
    for _ in range(12):
        made.is_due(4)
        made.choose(requests, 100.0)
    assert not any(one.chosen for one in requests)
    assert made.reads_prompts


def test_likely_requests_get_more_than_unlikely_ones() -> None:
    made = controller(row_seconds=2e-3)
    likely, unlikely = request(made), request(made)
    show(likely, 30, MAX_TOKENS, MAX_TOKENS)
    show(unlikely, 30, MAX_TOKENS, 0)
    made.choose([likely, unlikely], 100.0)
    assert likely.chosen > 2
    assert unlikely.chosen == 0


def test_fixed_disabled_and_free_requests_share_a_batch() -> None:
    made = controller()
    requests = [request(made, fixed=3), disabled(), request(made), request(made, fixed=0)]
    show(requests[2], 30, MAX_TOKENS, MAX_TOKENS)
    made.choose(requests, 100.0)
    assert [each.chosen for each in requests] == [3, 0, MAX_TOKENS, 0]
    assert made.methods["draft_model"].num_tokens == 3 + MAX_TOKENS


def test_a_batch_in_which_nothing_pays_drafts_nothing() -> None:
    made = controller(row_seconds=1e-2, draft=DraftTimes(per_level=1e-2))
    requests = [request(made) for _ in range(8)]
    made.choose(requests, 100.0)
    assert all(each.chosen == 0 for each in requests)


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    made = controller(medusa=Shape(24, whole=True), ngram=Shape(4))
    trees = [request(made, method="medusa") for _ in range(3)]
    chains = [request(made, method="ngram") for _ in range(3)]
    show(trees[0], 40, MAX_TOKENS, 0)
    show(trees[1], 40, MAX_TOKENS, MAX_TOKENS)
    made.choose([*trees, *chains], 100.0)
    assert trees[1].chosen == 24
    assert {tree.chosen for tree in trees} <= {0, 24}
    assert all(0 < chain.chosen <= 4 for chain in chains)


@pytest.mark.parametrize(("num_rows", "pays"), [(24, False), (8, True)])
def test_a_tree_that_has_fewer_rows_brings_as_much(num_rows: int, pays: bool) -> None:
    made = controller(row_seconds=1e-3, medusa=Shape(24, whole=True))
    tree = request(made, method="medusa")
    show(tree, 40, MAX_TOKENS, 2)
    for _ in range(100):
        tree.acceptance.observe_share(24, num_rows)
    made.choose([tree], 100.0)
    assert (tree.chosen > 0) == pays


def test_a_gain_that_is_too_small_is_not_taken() -> None:
    for least_gain, drafts in ((0.0, True), (0.1, True), (3.0, False)):
        made = controller()
        made.methods["draft_model"].least_gain = least_gain
        one = request(made)
        made.choose([one], 100.0)
        assert (one.chosen > 0) == drafts


def test_the_deeper_the_dearer_for_a_sequential_drafter() -> None:
    def deepest(per_level: float) -> int:
        made = controller(draft=DraftTimes(per_level=per_level))
        one = request(made)
        show(one, 30, MAX_TOKENS, 3)
        made.choose([one], 100.0)
        return one.chosen

    assert deepest(1e-6) >= deepest(1e-3) >= deepest(4e-3)
    assert deepest(1e-6) > deepest(4e-3)


def test_what_the_drafter_has_missed_makes_it_dearer() -> None:
    made = controller(draft=DraftTimes(per_read=1e-3))
    near, far = request(made), request(made)
    show(near, 30, 2, 1)
    show(far, 30, 2, 1)
    far.backlog = 100_000
    made.choose([near, far], 100.0)
    assert near.chosen > 0
    assert far.chosen == 0


def test_the_same_history_makes_the_same_choice() -> None:
    engines = [SimulatedEngine(8, RATES["unlike"]) for _ in range(2)]
    for _ in range(100):
        for engine in engines:
            engine.step()
        assert engines[0].chosen == engines[1].chosen


def test_the_report_has_what_a_router_needs() -> None:
    engine = SimulatedEngine(4, RATES["high"], output_tokens=10_000)
    engine.run(300)
    state = engine.controller.report(MAX_TOKENS)
    (method,) = state.methods
    assert (method.num_requests, method.num_tokens) == (4, sum(engine.chosen))
    assert method.acceptance[0] == pytest.approx(0.85, abs=0.05)
    assert method.level_s == pytest.approx(6e-4, rel=0.2)
    rows, seconds = state.step_time.rows, state.step_time.seconds
    assert seconds == sorted(seconds)
    assert seconds[rows.index(4)] == pytest.approx(target_seconds(4), rel=0.1)


def steps_until_due(made: Controller, num_requests: int) -> int:
    return next(steps for steps in range(1, 100) if made.is_due(num_requests))


def test_a_choice_stands_for_some_steps_unless_somebody_comes_or_goes() -> None:
    made, dear = controller(), controller(row_seconds=1e-2, draft=DraftTimes(per_level=1e-2))
    stood = []
    for one in (made, dear):
        requests = [request(one) for _ in range(2)]
        assert one.is_due(2)
        one.choose(requests, 100.0)
        assert not one.is_watched  # choosing took time too
        assert not one.is_due(2)
        assert one.is_watched
        stood.append(steps_until_due(one, 2))
        assert one.is_watched  # nothing is known of such steps yet
        for _ in range(100):
            one.observe_step(2, 4, 100.0, 5e-3)
        assert not one.is_watched
        assert one.rests == (one is dear)
        one.choose(requests, 100.0)
        assert one.is_due(3)
    assert 1 < stood[0] < stood[1]


def test_where_drafts_hardly_ever_pay_only_a_choice_may_lead_to_some() -> None:
    made = controller(row_seconds=1.0)
    requests = [request(made) for _ in range(2)]
    for _ in range(20):
        made.is_due(2)
        assert made.may_draft_next, "not enough is known"
        made.choose(requests, 100.0)
        if not made.may_draft_next:
            break
    steps = 0
    while not made.may_draft_next:
        assert not made.is_due(2)
        steps += 1
    assert steps > 30
    assert made.is_due(2)


def test_requests_to_come_count_as_if_they_were_there() -> None:
    made = controller(row_seconds=1e-3)
    one = request(made)
    for num_to_come, drafts in ((0, True), (63, False), (0, True)):
        assert made.is_due(1, num_to_come)
        made.choose([one], 100.0)
        assert (one.chosen > 0) == drafts
        assert made.is_idle != drafts
    assert not made.is_due(0, 1)
    assert not made.is_idle, "nobody decodes"


def test_trials_are_short() -> None:
    """There are two kinds, of six steps and of one, and one may follow the other."""
    engine = SimulatedEngine(1, lambda number, place: 0.0)
    engine.method.num_first = FIRST_DRAFTS
    engine.run(200)
    tried = []
    for _ in range(2000):
        engine.step()
        tried.append(engine.chosen[0] > 0)
    runs = [len(list(run)) for is_trial, run in itertools.groupby(tried) if is_trial]
    assert runs and max(runs) <= 7
